"""The policy loss and its gradient against float64 numpy, and what must not change them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from harness_s_jax.batch import lay_out, pack_rows
from harness_s_jax.learner import loss
from harness_s_jax.learner.loss import Clip, Sums
from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.types import PackedRows, Segment

# An output matrix of its own: float64 numpy can repeat all that comes after the hidden states, and
# differentiate it. The model below it has tests of its own.
CONFIG = Qwen35Config(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    tie_word_embeddings=False,
)  # fmt: skip
KNOWN = 37  # the ids from here on are the model's padding
ROW, ROWS, ATTEMPTS = 32, 4, 6
CLIP = Clip(low=0.2, high=0.35)
PARAMS = qwen3_5.init_params(CONFIG, jax.random.key(1))
SEEDS = range(6)
HEAD_DV = np.asarray(PARAMS["head_DV"], np.float64)


class Case(NamedTuple):
    rows: PackedRows
    advantage_A: np.ndarray
    weight_A: np.ndarray
    hidden_BTD: np.ndarray  # float64


@jax.jit
def hidden(rows: PackedRows) -> jax.Array:
    return qwen3_5.forward(PARAMS, CONFIG, rows.ids_BT, rows.segment_BT, rows.position_BT)


def policy_loss(params: Any, rows: PackedRows, advantage_A: Any, weight_A: Any) -> Any:
    given = (params, CONFIG, rows, advantage_A, weight_A)
    return loss.policy_loss(*given, clip=CLIP, vocab_size=KNOWN)


@jax.jit
def loss_sums_gradient(rows: PackedRows, advantage_A: Any, weight_A: Any) -> Any:
    def of_head(head_DV: jax.Array) -> tuple[jax.Array, Sums]:
        return policy_loss(PARAMS | {"head_DV": head_DV}, rows, advantage_A, weight_A)

    return jax.value_and_grad(of_head, has_aux=True)(PARAMS["head_DV"])


def run(case: Case, **changes: Any) -> tuple[float, Sums, np.ndarray]:
    """Loss, sums and gradient of what is tested, with some arrays of the rows replaced."""
    rows = dataclasses.replace(case.rows, **changes)
    (value, sums), gradient = loss_sums_gradient(rows, case.advantage_A, case.weight_A)
    return float(value), jax.device_get(sums), np.asarray(gradient)


# --- the reference --------------------------------------------------------------------------------


def distributions(case: Case, head_DV: np.ndarray = HEAD_DV) -> np.ndarray:
    """log p of every id at every place, given what is before it there: [B, T, V] float64."""
    temperature_BT = case.rows.temperature_BT.astype(np.float64)
    temperature_BT = np.where(temperature_BT == 0, 1.0, temperature_BT)
    scores_BTV = np.zeros((*temperature_BT.shape, CONFIG.vocab_size))
    scores_BTV[:, 1:] = case.hidden_BTD[:, :-1] @ head_DV / temperature_BT[:, 1:, None]
    scores_BTV[..., KNOWN:] = -np.inf
    scores_BTV -= scores_BTV.max(-1, keepdims=True)
    return scores_BTV - np.log(np.exp(scores_BTV).sum(-1, keepdims=True))


def of_ids(values_BTV: np.ndarray, ids_BT: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values_BTV, ids_BT[..., None], axis=-1)[..., 0]


def counted(case: Case) -> np.ndarray:
    """Which places count."""
    taught = [a for a in range(ATTEMPTS) if case.weight_A[a] > 0]
    return case.rows.sampled_BT & np.isin(case.rows.attempt_BT, taught)


class Reference(NamedTuple):  # of the tokens that count, one after another
    weight_n: np.ndarray
    advantage_n: np.ndarray
    ratio_n: np.ndarray
    clipped_n: np.ndarray  # the bound is what is minimised, and so has no slope

    @property
    def loss(self) -> float:
        bounded_n = np.clip(self.ratio_n, 1 - CLIP.low, 1 + CLIP.high)
        taken_n = np.where(self.clipped_n, bounded_n, self.ratio_n)
        return float(-np.sum(self.weight_n * taken_n * self.advantage_n))


def reference(case: Case, head_DV: np.ndarray = HEAD_DV) -> Reference:
    here = counted(case)
    attempt_n = case.rows.attempt_BT[here]
    advantage_n = case.advantage_A.astype(np.float64)[attempt_n]
    logp_n = of_ids(distributions(case, head_DV), case.rows.ids_BT)[here]
    ratio_n = np.exp(logp_n - case.rows.logp_BT[here])
    # min(ratio A, clipped ratio A) takes the bound above for gains, below for losses.
    clipped_n = np.where(advantage_n > 0, ratio_n > 1 + CLIP.high, ratio_n < 1 - CLIP.low)
    return Reference(case.weight_A.astype(np.float64)[attempt_n], advantage_n, ratio_n, clipped_n)


def slopes(case: Case) -> np.ndarray:
    """d loss / d log p of the tokens that count, by hand: -weight * ratio * A unless clipped."""
    ref = reference(case)
    return np.where(ref.clipped_n, 0.0, -ref.weight_n * ref.ratio_n * ref.advantage_n)


def reference_gradient(case: Case) -> np.ndarray:
    """d loss / d head [D, V]."""
    here = counted(case)
    slope_nV = -np.exp(distributions(case)[here])
    slope_nV[np.arange(len(slope_nV)), case.rows.ids_BT[here]] += 1.0
    temperature_n = case.rows.temperature_BT[here]
    slope_nV *= (slopes(case) / np.where(temperature_n == 0, 1.0, temperature_n))[:, None]
    b, t = np.nonzero(here)
    return case.hidden_BTD[b, t - 1].T @ slope_nV


# --- cases ----------------------------------------------------------------------------------------


def segment(length: int, temperature: float, rng: np.random.Generator) -> Segment:
    sampled_T = rng.random(length) < 0.6
    sampled_T[0] = False  # nothing predicts it
    ids_T = rng.integers(0, KNOWN, length, dtype=np.int32)
    temperature_T = np.where(sampled_T, temperature, 0.0).astype(np.float32)
    version_T = np.where(sampled_T, 0, -1).astype(np.int32)
    return Segment(ids_T, sampled_T, np.zeros(length, np.float32), temperature_T, version_T)


@functools.cache
def make(seed: int) -> Case:
    """Two segments of each attempt in shared rows, sampled off policy: log-probabilities are the
    learner's up to 0.7 nats, but nowhere so that rounding decides whether a bound binds."""
    rng = np.random.default_rng(seed)
    owners = [*range(ATTEMPTS), *range(ATTEMPTS)]
    temperature_A = rng.permutation(np.asarray([0.7, 1.3, 0.7, 1.3, 1.0, 0.0]))
    segments = [segment(int(n), temperature_A[a], rng)
                for a, n in zip(owners, rng.integers(5, 11, len(owners)), strict=True)]  # fmt: skip
    rows = lay_out(segments, owners, pack_rows(segments, ROW), ROW, ROWS)
    # Both signs, whichever attempts have which temperature.
    advantage_A = rng.permutation(np.float32([1.5, 0.8, 0.4, -0.5, -0.9, -1.6]))
    weight_A = (rng.uniform(0.5, 1.5, ATTEMPTS) / 60).astype(np.float32)
    weight_A[4] = 0.0  # as if its group taught nothing
    case = Case(rows, advantage_A, weight_A, np.asarray(hidden(rows), np.float64))
    apart_BT = rng.uniform(-0.7, 0.7, rows.ids_BT.shape)
    for edge in (np.log(1 - CLIP.low), np.log(1 + CLIP.high)):
        apart_BT = np.where(np.abs(apart_BT - edge) < 0.01, edge + 0.02, apart_BT)
    logp_BT = of_ids(distributions(case), rows.ids_BT) - apart_BT
    rows.logp_BT[rows.sampled_BT] = logp_BT[rows.sampled_BT]
    return case


def assert_same(got: tuple[float, Sums, np.ndarray], wanted: tuple[float, Sums, np.ndarray]):
    """Bit for bit."""
    assert got[0] == wanted[0]
    assert got[1] == wanted[1]
    np.testing.assert_array_equal(got[2], wanted[2])


# --- value and gradient ---------------------------------------------------------------------------


def test_the_cases_are_what_they_should_be():
    """Either bound is passed with either sign of advantage, in every case; rows are shared."""
    for case in map(make, SEEDS):
        ref = reference(case)
        for gains in (ref.advantage_n > 0, ref.advantage_n < 0):
            assert (gains & (ref.ratio_n > 1 + CLIP.high)).sum() >= 2
            assert (gains & (ref.ratio_n < 1 - CLIP.low)).sum() >= 2
            assert 0.1 < ref.clipped_n[gains].mean() < 0.6
        assert (case.rows.segment_BT.max(axis=1)[:3] >= 2).all()
        assert set(case.rows.temperature_BT.flat) == set(np.float32([0.0, 0.7, 1.0, 1.3]))


@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_is_the_reference(seed: int):
    wanted, (_, _, gradient) = reference_gradient(make(seed)), run(make(seed))
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(gradient, wanted, atol=1e-5 * np.abs(wanted).max())
    assert (gradient[:, KNOWN:] == 0.0).all()  # exactly: those ids are in no distribution


def test_the_references_gradient_is_its_slope():
    case, rng = make(0), np.random.default_rng(5)
    for _ in range(3):
        way_DV = rng.standard_normal(HEAD_DV.shape)
        up, down = (reference(case, HEAD_DV + h * way_DV).loss for h in (1e-6, -1e-6))
        wanted = float(np.sum(reference_gradient(case) * way_DV))
        assert (up - down) / 2e-6 == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_sums_are_the_reference(seed: int):
    case = make(seed)
    ref, (value, sums, _) = reference(case), run(case)
    assert value == float(sums.loss) == pytest.approx(ref.loss, abs=2e-6)
    logp_nV, log_ratio_n = distributions(case)[counted(case)][:, :KNOWN], np.log(ref.ratio_n)
    assert float(sums.tokens) == len(ref.ratio_n)
    assert float(sums.entropy) == pytest.approx(-np.sum(np.exp(logp_nV) * logp_nV), rel=1e-5)
    assert float(sums.kl) == pytest.approx(np.sum(ref.ratio_n - 1 - log_ratio_n), rel=1e-4)
    assert float(sums.clipped) == ref.clipped_n.sum()
    assert float(sums.gap) == pytest.approx(np.abs(log_ratio_n).max(), abs=1e-5)


# --- what must not change them --------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches_add_up(seed: int):
    case = make(seed)
    whole, parts = run(case), []
    for own in ([0, 2], [1], [3], []):  # an empty part too: all padding
        part = PackedRows.empty(ROWS, ROW)
        for name in vars(part):
            getattr(part, name)[own] = getattr(case.rows, name)[own]
        parts.append(run(case._replace(rows=part)))
    assert sum(p[0] for p in parts) == pytest.approx(whole[0], abs=1e-6)
    scale = np.abs(whole[2]).max()
    np.testing.assert_allclose(sum(p[2] for p in parts), whole[2], atol=1e-5 * scale)
    sums = functools.reduce(Sums.add, (p[1] for p in parts), Sums.zero())
    np.testing.assert_allclose(np.asarray(sums), np.asarray(whole[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, -1e30])
def test_what_does_not_count_poisons_nothing(junk: float, monkeypatch: pytest.MonkeyPatch):
    case = make(2)
    silent_BT = ~counted(case)
    advantage_A = np.where(case.weight_A > 0, case.advantage_A, np.float32(junk))
    for name in ("logp_BT", "temperature_BT"):
        junk_BT = np.where(silent_BT, np.float32(junk), getattr(case.rows, name))
        got = run(case._replace(advantage_A=advantage_A), **{name: junk_BT})
        assert_same(got, run(case))
    # The gradient with respect to the log-probabilities alone, with junk in the learner's too.
    monkeypatch.setattr(loss, "token_scores", lambda logp_BT, *_, **__: (logp_BT, logp_BT))
    learners_BT = of_ids(distributions(case), case.rows.ids_BT)
    theirs_BT, logp_BT = (
        np.where(silent_BT, junk, x).astype(np.float32) for x in (case.rows.logp_BT, learners_BT)
    )
    rows = dataclasses.replace(case.rows, logp_BT=theirs_BT)
    slope_BT = jax.grad(lambda x: policy_loss(x, rows, advantage_A, case.weight_A)[0])(logp_BT)
    np.testing.assert_allclose(slope_BT[~silent_BT], slopes(case), rtol=1e-5)
    assert (slope_BT[silent_BT] == 0.0).all()


def test_what_lies_in_padding_is_nobodys_business():
    case = make(3)
    padding_BT = case.rows.segment_BT == -1
    assert padding_BT.sum() > 5
    changes = {
        "ids_BT": np.where(padding_BT, 3, case.rows.ids_BT),
        "sampled_BT": case.rows.sampled_BT | padding_BT,
        "temperature_BT": np.where(padding_BT, np.float32(0.3), case.rows.temperature_BT),
    }
    assert_same(run(case, **changes), run(case))


@pytest.mark.parametrize("how", ["nothing sampled", "only padding", "nobody taught"])
def test_an_all_masked_batch_has_loss_zero_and_finite_zero_gradients(how: str):
    case = make(4)
    masked = {
        "nothing sampled": dataclasses.replace(case.rows, sampled_BT=np.zeros((ROWS, ROW), bool)),
        "only padding": PackedRows.empty(ROWS, ROW),
    }
    weight_A = case.weight_A * (how in masked)
    got = run(case._replace(rows=masked.get(how, case.rows), weight_A=weight_A))
    assert_same(got, (0.0, Sums(*[0.0] * 6), np.zeros_like(HEAD_DV)))  # and so no NaN


# --- scores ---------------------------------------------------------------------------------------


def test_ids_beyond_the_vocabulary_do_not_exist():
    """As if the model's logits ended before them."""
    case, rows = make(5), make(5).rows
    scores = jax.jit(token_scores, static_argnames=("config", "vocab_size"))
    logp_BT, entropy_BT = scores(PARAMS, CONFIG, rows, vocab_size=KNOWN)
    cut_BTV = distributions(case)[..., :KNOWN]
    predicted_BT = rows.position_BT > 0
    for got_BT, wanted_BT in (
        (logp_BT, of_ids(cut_BTV, rows.ids_BT)),
        (entropy_BT, -np.sum(np.exp(cut_BTV) * cut_BTV, axis=-1)),
    ):
        np.testing.assert_allclose(got_BT, np.where(predicted_BT, wanted_BT, 0.0), atol=1e-5)
        assert (np.asarray(got_BT)[~predicted_BT] == 0.0).all()
