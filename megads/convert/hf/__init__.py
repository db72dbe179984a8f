"""Hugging Face, in and out."""
