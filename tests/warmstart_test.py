"""The warm start: reproducible, resumable, and honest about what it demonstrates."""

import asyncio

import numpy as np
import pytest

from experiments.miniworld_policy import SYSTEM, warmstart_config
from harness_s_jax import warmstart
from harness_s_jax.harness.directions import DIRECTIONS, is_held_out
from harness_s_jax.harness.spec import load_pool
from harness_s_jax.model.policy import SHIPPED, load_policy
from harness_s_jax.model.template import embedded_template


def small_config():
    config = warmstart_config()
    config.demonstration_tasks = 40
    config.demonstrations = 80
    config.steps = 6
    config.warmup_steps = 2
    config.batch_rows = 4
    config.log_every = 1
    config.save_every = 2
    config.model.hidden_size = 32
    config.model.intermediate_size = 32
    config.model.num_attention_heads = 1
    config.model.head_dim = 16
    config.model.linear_num_key_heads = 1
    config.model.linear_num_value_heads = 1
    return config


@pytest.fixture(scope="module")
def template():
    return embedded_template(warmstart.make_tokenizer(small_config()))


def test_an_interrupted_warm_start_goes_on_to_the_same_weights(tmp_path):
    config = small_config()

    def interrupt(line: str) -> None:
        if line.startswith("warmstart 5/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmstart.run(config, tmp_path / "a", tmp_path / "checkpoints", interrupt)
    lines: list[str] = []
    warmstart.run(config, tmp_path / "a", tmp_path / "checkpoints", lines.append)
    assert "warmstart: goes on after step 4" in lines
    warmstart.run(config, tmp_path / "b", tmp_path / "other", lambda line: None)
    files = [(tmp_path / d / "model.safetensors").read_bytes() for d in "ab"]
    assert files[0] == files[1]


def test_demonstrations_never_show_a_held_out_wording(template):
    made = asyncio.run(warmstart.demonstrations(small_config(), template))
    texts = [template.decode(t.segments[0].ids_T.tolist()) for t in made]
    wordings = [s for d in DIRECTIONS.values() for s in d.sentences()]
    heard = [s for text in texts for s in wordings if s in text]
    assert heard
    assert not any(is_held_out(s) for s in heard)
    assert max(len(t.segments[0].ids_T) for t in made) <= small_config().row_tokens


def test_every_batch_is_whole_and_the_same_again(template):
    config = small_config()
    made = asyncio.run(warmstart.demonstrations(config, template))
    first, second = (list(warmstart.batches(made, config, 5)) for _ in range(2))
    assert len(first) == 5
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.ids_BT, b.ids_BT)
        assert a.ids_BT.shape == (config.batch_rows, config.row_tokens)
        assert a.sampled_BT.any()
        for number in set(a.attempt_BT[a.segment_BT >= 0].tolist()):
            (segment,) = made[number].segments
            own_BT = a.attempt_BT == number
            np.testing.assert_array_equal(a.ids_BT[own_BT], segment.ids_T)
            np.testing.assert_array_equal(a.sampled_BT[own_BT], segment.sampled_T)


def test_the_shipped_policy_fits_the_limits_of_the_embedded_world():
    stored = load_policy(SHIPPED)
    size = sum(f.stat().st_size for f in SHIPPED.iterdir())
    assert size <= 10e6
    assert stored.template.vocab_size <= 1024
    assert load_pool()[0].system == SYSTEM
