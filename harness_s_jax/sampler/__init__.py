"""Batched multi-turn decoding that keeps each attempt's cache between turns."""
