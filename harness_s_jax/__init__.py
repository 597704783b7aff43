"""Harness-S in JAX: train a language-model agent by learning from sibling harnesses."""
