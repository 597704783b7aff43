"""The formula against figures worked out by hand, and its parts against each other."""

import pytest

from harness_s_jax.model.config import PRESETS
from harness_s_jax.model.flops import forward_flops, train_flops


@pytest.mark.parametrize(
    ("model", "tokens", "gflop"),
    [("4b", 16384, 9.61), ("4b", 32768, 10.68), ("9b", 16384, 17.07), ("9b", 32768, 18.15)],
)
def test_gflop_a_token_of_the_published_sizes(model, tokens, gflop):
    per_token = forward_flops(PRESETS[model], [tokens]) / tokens / 1e9
    assert per_token == pytest.approx(gflop, abs=0.006)
    assert train_flops(PRESETS[model], [tokens]) == 3 * forward_flops(PRESETS[model], [tokens])


def test_packing_costs_what_its_segments_cost():
    config = PRESETS["4b"]
    alone = forward_flops(config, [1000]) + forward_flops(config, [3000])
    assert forward_flops(config, [1000, 3000]) == pytest.approx(alone, rel=1e-12)
    assert forward_flops(config, [4000]) > alone  # longer attention


def test_the_head_counts_only_where_it_is_used():
    config = PRESETS["4b"]
    saved = forward_flops(config, [1000]) - forward_flops(config, [1000], head_tokens=100)
    assert saved == pytest.approx(2 * 900 * config.vocab_size * config.hidden_size)
