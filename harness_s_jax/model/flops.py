"""How many floating-point operations the model needs, by formula: the numerator of MFU.

XLA's cost analysis counts the body of a scan once and knows nothing of custom calls, so it cannot
be asked. A multiplication and an addition are two operations; norms, gates and the convolution are
left out, as is whatever rematerialisation or padding adds (that is model FLOPs, not hardware's).
"""

from __future__ import annotations

from collections.abc import Sequence

from harness_s_jax.model.config import LINEAR_PER_BLOCK, Qwen35Config
from harness_s_jax.model.params import num_params

CHUNK = 64  # tokens of the delta rule worked on at once, as in the reference


def forward_flops(
    config: Qwen35Config, lengths: Sequence[int], *, head_tokens: int | None = None
) -> float:
    """Operations of a forward pass over segments of these lengths, however they are packed.

    `head_tokens` of the tokens are projected on the vocabulary (all by default). Attention is
    causal: a token sees half its segment on average, so long segments cost more a token.
    """
    c, tokens = config, sum(lengths)
    head_tokens = tokens if head_tokens is None else head_tokens
    embedding = c.vocab_size * c.hidden_size
    body = num_params(c) - embedding * (1 if c.tie_word_embeddings else 2)
    dense = 2.0 * (body * tokens + embedding * head_tokens)
    dk, dv = c.linear_key_head_dim, c.linear_value_head_dim
    a_head = 4 * CHUNK * dk + CHUNK * (dk + dv) + 2 * CHUNK * dv + 6 * dk * dv
    delta = LINEAR_PER_BLOCK * c.num_blocks * c.linear_num_value_heads * a_head * tokens
    attention = (
        2.0 * c.num_blocks * c.num_attention_heads * c.head_dim * sum(n * n for n in lengths)
    )
    return dense + delta + attention


def train_flops(
    config: Qwen35Config, lengths: Sequence[int], *, head_tokens: int | None = None
) -> float:
    """Operations of a forward and backward pass: the backward counts twice the forward."""
    return 3.0 * forward_flops(config, lengths, head_tokens=head_tokens)
