"""GPT-NeoX in."""
