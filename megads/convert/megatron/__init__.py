"""Megatron-LM, in and out."""
