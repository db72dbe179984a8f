"""Megatron-DeepSpeed in, both forks; what GPT-NeoX has in common with them."""
