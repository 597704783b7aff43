"""Only what trains is projected on the vocabulary, in chunks, and it is scored as if all were."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness_s_jax.learner import scores
from harness_s_jax.learner.loss import Objective, policy_loss
from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.rows import PackedRows

# A vocabulary so wide that nothing else is as large as the logits of all places.
CONFIG = Qwen35Config(
    vocab_size=331, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    tie_word_embeddings=False,
)  # fmt: skip
D, V, KNOWN, B, T = CONFIG.hidden_size, CONFIG.vocab_size, 317, 3, 22
# Tokens of a row that a chunk may have; chunks then have 1, 6, 8 and 22. Where 6 or 8 do not divide
# T, the end of the last chunk is nobody's: padding there must have no gradient.
SIZES = [1, 7, 10, 40]


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scores, "CHUNK_LOGITS", request.param * V)
    return request.param


@pytest.fixture
def headless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden states and the output matrix are the parameters; there is no model."""
    monkeypatch.setattr(qwen3_5, "forward", lambda params, *_, **__: params["hidden_BTD"])
    monkeypatch.setattr(qwen3_5, "head", lambda params, _: params["head_DV"])


def rows(rng: np.random.Generator) -> PackedRows:
    """Segments of 8, 8 and 4 tokens in each row, and padding."""
    made = PackedRows.empty(B, T)
    length_S = [8, 8, 4]
    used = sum(length_S)
    made.segment_BT[:, :used] = np.repeat(np.arange(3), length_S)
    made.position_BT[:, :used] = np.concatenate([np.arange(n) for n in length_S])
    made.ids_BT[:, :used] = rng.integers(0, KNOWN, (B, used))
    made.sampled_BT[:] = (made.position_BT > 0) & (rng.random((B, T)) < 0.6)
    made.logp_BT[:] = np.where(made.sampled_BT, -math.log(KNOWN), 0.0)
    temperature_BT = rng.choice(np.float32([0.6, 1.0, 1.4]), (B, T))
    made.temperature_BT[:] = np.where(made.sampled_BT, temperature_BT, 0.0)
    made.attempt_BT[:, :used] = made.segment_BT[:, :used]
    return made


def wanted(name: str, rng: np.random.Generator) -> np.ndarray:
    given = rng.random((B, T)) < 0.5
    if name == "one row empty":
        given[1] = False
    return {"none": np.zeros((B, T), bool), "all": np.ones((B, T), bool)}.get(name, given)


def projected(given: PackedRows, wanted_BT: np.ndarray) -> int:
    """Of the fullest row: the wanted places that something predicts."""
    return int((wanted_BT & (given.position_BT > 0)).sum(axis=1).max())


def plain_scores(params: Any, config: Any, given: PackedRows, wanted_BT: Any, **_: Any) -> Any:
    """What `token_scores` says, from the logits of all places."""
    hidden_BTD = qwen3_5.forward(params, config, given.ids_BT, given.segment_BT, given.position_BT)
    temperature_BT = jnp.where(given.temperature_BT > 0, given.temperature_BT, 1.0)
    before_BTD = jnp.roll(hidden_BTD, 1, axis=1)
    logits_BTV = before_BTD @ qwen3_5.head(params, config) / temperature_BT[..., None]
    logp_BTV = jax.nn.log_softmax(logits_BTV[..., :KNOWN])
    chosen_BT1 = jnp.asarray(given.ids_BT)[..., None]
    logp_BT = jnp.take_along_axis(logp_BTV, chosen_BT1, axis=-1)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)
    here_BT = wanted_BT & (given.position_BT > 0)
    return tuple(jnp.where(here_BT, x, 0.0) for x in (logp_BT, entropy_BT))


# --- as if all were -------------------------------------------------------------------------------


@pytest.mark.usefixtures("headless", "size")
@pytest.mark.parametrize("name", ["none", "all", "random", "one row empty"])
def test_scores_and_gradients_are_those_of_all_logits(name: str):
    rng = np.random.default_rng(4)
    given, wanted_BT = rows(rng), wanted(name, rng)
    params = {
        "hidden_BTD": rng.normal(size=(B, T, D)).astype(np.float32),
        "head_DV": rng.normal(0, 0.5, (D, V)).astype(np.float32),
    }
    coefficient_BT = rng.normal(size=(B, T)).astype(np.float32)

    def both(score: Callable[..., Any]) -> Any:
        def weighed(params: Any) -> Any:
            out = score(params, CONFIG, given, wanted_BT, vocab_size=KNOWN)
            return jnp.sum(coefficient_BT * out[0]), out

        (_, out), grads = jax.jit(jax.value_and_grad(weighed, has_aux=True))(params)
        return jax.device_get((*out, grads["hidden_BTD"], grads["head_DV"]))

    for got, reference in zip(both(scores.token_scores), both(plain_scores), strict=True):
        assert (np.abs(reference).max() > 0.1) == (name != "none")
        scale = max(1e-30, float(np.abs(reference).max()))
        np.testing.assert_allclose(got, reference, rtol=0, atol=1e-5 * scale)


@pytest.mark.usefixtures("headless")
def test_the_entropy_has_no_gradient():
    rng = np.random.default_rng(5)
    given = rows(rng)
    params = {
        "hidden_BTD": rng.normal(size=(B, T, D)).astype(np.float32),
        "head_DV": rng.normal(size=(D, V)).astype(np.float32),
    }

    def entropy(params: Any) -> jax.Array:
        out = scores.token_scores(params, CONFIG, given, given.sampled_BT, vocab_size=KNOWN)
        return jnp.sum(out[1])

    value, grads = jax.jit(jax.value_and_grad(entropy))(params)
    assert value > 1
    assert not any(np.any(x) for x in jax.tree.leaves(grads))


# --- only what trains -----------------------------------------------------------------------------


@pytest.mark.usefixtures("headless")
@pytest.mark.parametrize("name", ["none", "all", "random", "one row empty"])
def test_as_many_chunks_are_worked_off_as_the_fullest_row_needs(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
):
    """Forward and backward, as the compiled program runs them: logits are made so often."""
    rng, made, project = np.random.default_rng(6), [], scores._logits
    given, wanted_BT = rows(rng), wanted(name, rng)

    def counted(hidden_BID: jax.Array, *rest: Any) -> jax.Array:
        jax.debug.callback(made.append, hidden_BID.shape[1])
        return project(hidden_BID, *rest)

    monkeypatch.setattr(scores, "_logits", counted)

    @jax.jit
    @jax.grad
    def gradient(params: Any) -> jax.Array:
        return scores.token_scores(params, CONFIG, given, wanted_BT, vocab_size=KNOWN)[0].sum()

    jax.block_until_ready(gradient({"hidden_BTD": np.ones((B, T, D), np.float32),
                                    "head_DV": np.ones((D, V), np.float32)}))  # fmt: skip
    jax.effects_barrier()
    chunk = math.ceil(T / math.ceil(T / size))
    assert chunk <= size
    assert [int(n) for n in made] == [chunk] * 2 * math.ceil(projected(given, wanted_BT) / chunk)


def largest(program: str) -> int:
    """Numbers in the largest array that some instruction of a compiled program makes."""
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", program)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@functools.cache
def fresh() -> Any:
    return qwen3_5.init_params(CONFIG, jax.random.key(0))


def loss_gradient() -> jax.stages.Compiled:
    """The loss's gradient in all parameters, compiled, with the counted tokens in its rows."""
    given = rows(np.random.default_rng(7))
    loss = functools.partial(
        policy_loss, config=CONFIG, objective=Objective(0.2, 0.2), vocab_size=KNOWN
    )
    weight_A = np.full(3, 0.02, np.float32)

    @jax.jit
    def gradient(params: Any, given: PackedRows, advantage_A: Any, weight_A: Any) -> Any:
        return jax.grad(loss, has_aux=True)(
            params, rows=given, advantage_A=advantage_A, weight_A=weight_A
        )[0]

    return gradient.lower(fresh(), given, np.ones(3, np.float32), weight_A).compile()


def test_logits_of_all_places_never_exist(monkeypatch: pytest.MonkeyPatch):
    """No array of the loss's gradient is as large as [B, T, V], in any order and under any type;
    it is with the logits of all places, so that this would tell."""
    monkeypatch.setattr(scores, "CHUNK_LOGITS", 6 * V)
    chunked = loss_gradient().as_text()
    assert re.search(rf"f32\[{B},6,{V}\]", chunked)  # a chunk's do exist
    assert largest(chunked) == B * 6 * V
    monkeypatch.setattr("harness_s_jax.learner.loss.token_scores", plain_scores)
    assert largest(loss_gradient().as_text()) >= B * T * KNOWN
