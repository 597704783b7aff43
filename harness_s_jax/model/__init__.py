"""The policy: Qwen3.5 in JAX, its tokenizer and its chat template."""
