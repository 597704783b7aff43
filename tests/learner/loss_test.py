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
from harness_s_jax.learner.loss import Objective, Sums
from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.rows import PackedRows
from harness_s_jax.types import Segment

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
PLAIN = Objective(clip_low=0.2, clip_high=0.35)
OBJECTIVES = {
    "plain": PLAIN,
    "sequence": dataclasses.replace(PLAIN, ratio="sequence", clip_low=0.1, clip_high=0.1),
    "truncate": dataclasses.replace(PLAIN, correction="truncate", correction_high=1.3),
    "mask": dataclasses.replace(PLAIN, correction="mask", correction_low=0.7, correction_high=1.4),
    "sequence truncate": dataclasses.replace(
        PLAIN, ratio="sequence", correction="truncate", correction_high=1.05
    ),
    "sequence mask": dataclasses.replace(
        PLAIN, ratio="sequence", correction="mask", correction_low=0.9, correction_high=1.1
    ),
    "k2": dataclasses.replace(PLAIN, kl=0.3),
    "k3": dataclasses.replace(PLAIN, kl=0.3, kl_estimator="k3"),
    "truncate k2": dataclasses.replace(PLAIN, correction="truncate", correction_high=1.3, kl=0.3),
}
PARAMS = qwen3_5.init_params(CONFIG, jax.random.key(1))
SEEDS = range(6)
HEAD_DV = np.asarray(PARAMS["head_DV"], np.float64)


class Case(NamedTuple):
    rows: PackedRows
    advantage_A: np.ndarray
    weight_A: np.ndarray
    hidden_BTD: np.ndarray  # float64
    reference_BT: np.ndarray  # float32, log-probabilities of another policy


@jax.jit
def hidden(rows: PackedRows) -> jax.Array:
    return qwen3_5.forward(PARAMS, CONFIG, rows.ids_BT, rows.segment_BT, rows.position_BT)


def policy_loss(params: Any, rows: PackedRows, objective: Objective, *given: Any) -> Any:
    return loss.policy_loss(params, CONFIG, rows, *given, objective=objective, vocab_size=KNOWN)


@functools.partial(jax.jit, static_argnums=1)
def loss_sums_gradient(rows: PackedRows, objective: Objective, *given: Any) -> Any:
    def of_head(head_DV: jax.Array) -> tuple[jax.Array, Sums]:
        return policy_loss(PARAMS | {"head_DV": head_DV}, rows, objective, *given)

    return jax.value_and_grad(of_head, has_aux=True)(PARAMS["head_DV"])


def run(case: Case, objective: Objective = PLAIN, **changes: Any) -> tuple[float, Sums, np.ndarray]:
    """Loss, sums and gradient of what is tested, with some arrays of the rows replaced."""
    rows = dataclasses.replace(case.rows, **changes)
    given = (case.advantage_A, case.weight_A, case.reference_BT)
    (value, sums), gradient = loss_sums_gradient(rows, objective, *given)
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
    loss: float
    slope_n: np.ndarray  # d loss / d log p, by hand
    advantage_n: np.ndarray
    log_ratio_n: np.ndarray  # to the sampler, of each token
    r_n: np.ndarray  # what is clipped
    clipped_n: np.ndarray  # the bound is what is minimised, and so has no slope
    corrected_n: np.ndarray
    k3_n: np.ndarray


def reference(case: Case, objective: Objective = PLAIN, head_DV: np.ndarray = HEAD_DV) -> Reference:
    here, o = counted(case), objective
    attempt_n = case.rows.attempt_BT[here]
    advantage_n = case.advantage_A.astype(np.float64)[attempt_n]
    weight_n = case.weight_A.astype(np.float64)[attempt_n]
    logp_n = of_ids(distributions(case, head_DV), case.rows.ids_BT)[here]
    log_ratio_n = logp_n - case.rows.logp_BT[here]
    row_n, _ = np.nonzero(here)
    segment_n = case.rows.segment_BT[here]
    same_nn = (row_n == row_n[:, None]) & (segment_n == segment_n[:, None])
    if o.ratio == "token":
        same_nn = np.eye(len(row_n), dtype=bool)
    mean_nn = same_nn / same_nn.sum(1, keepdims=True)
    ratio_n = np.exp(mean_nn @ log_ratio_n)
    # (what a token's term weighs beside its weight, r, whether that is not pi / pi_sampler)
    importance_n, r_n, corrected_n = {
        "none": (np.ones_like(ratio_n), ratio_n, np.zeros_like(ratio_n, bool)),
        "truncate": (
            np.minimum(ratio_n, o.correction_high),
            np.ones_like(ratio_n),
            ratio_n > o.correction_high,
        ),
        "mask": (
            np.where((ratio_n > o.correction_high) | (ratio_n < o.correction_low), 0.0, ratio_n),
            np.ones_like(ratio_n),
            (ratio_n > o.correction_high) | (ratio_n < o.correction_low),
        ),
    }[o.correction]
    # min(ratio A, clipped ratio A) takes the bound above for gains, below for losses.
    high, low = 1 + o.clip_high, 1 - o.clip_low
    clipped_n = np.where(advantage_n > 0, r_n > high, r_n < low)
    taken_n = np.where(clipped_n, np.clip(r_n, low, high), r_n)
    part_n = weight_n * importance_n * advantage_n
    slope_n = mean_nn.T @ np.where(clipped_n, 0.0, -part_n * r_n)
    total = -np.sum(part_n * taken_n)
    k3_n = np.zeros_like(r_n)
    if o.kl:
        d_n = logp_n - case.reference_BT[here]
        k3_n = np.exp(-d_n) - 1 + d_n
        # The penalty weighs what a token's term weighs.
        weight_n = weight_n * importance_n
        total += o.kl * np.sum(weight_n * (k3_n if o.kl_estimator == "k3" else d_n**2 / 2))
        slope_n = slope_n + o.kl * weight_n * (1 - np.exp(-d_n) if o.kl_estimator == "k3" else d_n)
    return Reference(
        float(total), slope_n, advantage_n, log_ratio_n, r_n, clipped_n, corrected_n, k3_n
    )


def reference_gradient(case: Case, objective: Objective = PLAIN) -> np.ndarray:
    """d loss / d head [D, V]."""
    here = counted(case)
    slope_nV = -np.exp(distributions(case)[here])
    slope_nV[np.arange(len(slope_nV)), case.rows.ids_BT[here]] += 1.0
    temperature_n = case.rows.temperature_BT[here]
    slope_nV *= (
        reference(case, objective).slope_n / np.where(temperature_n == 0, 1.0, temperature_n)
    )[:, None]
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
    case = Case(
        rows,
        advantage_A,
        weight_A,
        np.asarray(hidden(rows), np.float64),
        np.zeros_like(rows.logp_BT),
    )
    apart_BT = rng.uniform(-0.7, 0.7, rows.ids_BT.shape)
    for edge in np.log([1 - PLAIN.clip_low, 1 + PLAIN.clip_high, 1.3, 0.7, 1.4]):
        apart_BT = np.where(np.abs(apart_BT - edge) < 0.01, edge + 0.02, apart_BT)
    logp_BT = of_ids(distributions(case), rows.ids_BT) - apart_BT
    rows.logp_BT[rows.sampled_BT] = logp_BT[rows.sampled_BT]
    apart_BT = rng.uniform(-0.7, 0.7, rows.ids_BT.shape)
    case.reference_BT[rows.sampled_BT] = (logp_BT - apart_BT)[rows.sampled_BT]
    return case


def assert_same(got: tuple[float, Sums, np.ndarray], wanted: tuple[float, Sums, np.ndarray]):
    """Bit for bit."""
    assert got[0] == wanted[0]
    assert got[1] == wanted[1]
    np.testing.assert_array_equal(got[2], wanted[2])


# --- value and gradient ---------------------------------------------------------------------------


def test_the_cases_are_what_they_should_be():
    """Either bound is passed with either sign of advantage, in every case; rows are shared; every
    correction takes hold of some tokens and leaves others."""
    for case in map(make, SEEDS):
        ref = reference(case)
        for gains in (ref.advantage_n > 0, ref.advantage_n < 0):
            assert (gains & (ref.r_n > 1 + PLAIN.clip_high)).sum() >= 2
            assert (gains & (ref.r_n < 1 - PLAIN.clip_low)).sum() >= 2
            assert 0.1 < ref.clipped_n[gains].mean() < 0.6
        assert (case.rows.segment_BT.max(axis=1)[:3] >= 2).all()
        assert set(case.rows.temperature_BT.flat) == set(np.float32([0.0, 0.7, 1.0, 1.3]))
    for name in ("sequence", "truncate", "mask", "sequence truncate", "sequence mask"):
        refs = [reference(make(seed), OBJECTIVES[name]) for seed in SEEDS]
        out = np.concatenate([r.clipped_n if name == "sequence" else r.corrected_n for r in refs])
        assert 0.05 < out.mean() < 0.8, name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_is_the_reference(name: str):
    for seed in SEEDS:
        wanted = reference_gradient(make(seed), OBJECTIVES[name])
        _, _, gradient = run(make(seed), OBJECTIVES[name])
        assert np.abs(wanted).max() > 0.003
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * np.abs(wanted).max())
        assert (gradient[:, KNOWN:] == 0.0).all()  # exactly: those ids are in no distribution


@pytest.mark.parametrize("name", ["plain", "sequence", "k2", "k3"])
def test_the_references_gradient_is_its_slope(name: str):
    """Where nothing of the loss is a constant by decree."""
    case, rng, objective = make(0), np.random.default_rng(5), OBJECTIVES[name]
    for _ in range(3):
        way_DV = rng.standard_normal(HEAD_DV.shape)
        up, down = (reference(case, objective, HEAD_DV + h * way_DV).loss for h in (1e-6, -1e-6))
        wanted = float(np.sum(reference_gradient(case, objective) * way_DV))
        assert (up - down) / 2e-6 == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_sums_are_the_reference(name: str):
    for seed in SEEDS:
        case = make(seed)
        ref, (value, sums, _) = (f(case, OBJECTIVES[name]) for f in (reference, run))
        assert value == float(sums.loss) == pytest.approx(ref.loss, abs=1e-6)
        logp_nV = distributions(case)[counted(case)][:, :KNOWN]
        assert float(sums.tokens) == len(ref.r_n)
        assert float(sums.entropy) == pytest.approx(-np.sum(np.exp(logp_nV) * logp_nV), rel=1e-5)
        wanted = np.sum(np.exp(ref.log_ratio_n) - 1 - ref.log_ratio_n)
        assert float(sums.kl) == pytest.approx(wanted, rel=1e-4)
        assert float(sums.kl_reference) == pytest.approx(ref.k3_n.sum(), rel=1e-4)
        assert float(sums.clipped) == ref.clipped_n.sum()
        assert float(sums.corrected) == ref.corrected_n.sum()
        assert float(sums.log_ratio_high) == pytest.approx(ref.log_ratio_n.max(), abs=1e-5)
        assert float(sums.log_ratio_low) == pytest.approx(ref.log_ratio_n.min(), abs=1e-5)


def test_k2_has_the_gradient_of_the_reverse_kl_and_k3_that_of_the_forward_one():
    """In expectation over tokens that the policy drew; k1's, as a loss, is 0 (trl#4967)."""
    rng = np.random.default_rng(3)
    logits_V, other_V = rng.standard_normal((2, 7))
    logp_V, ref_V = (x - np.log(np.exp(x).sum()) for x in (logits_V, other_V))
    p_V, q_V, d_V = np.exp(logp_V), np.exp(ref_V), logp_V - ref_V
    score_VV = np.eye(7) - p_V  # d log p_i / d logit_j

    def expected(slope_V: np.ndarray) -> np.ndarray:
        return (p_V * slope_V) @ score_VV

    reverse = (p_V * (d_V - p_V @ d_V)) @ np.eye(7)  # d KL(pi || ref) / d logits
    np.testing.assert_allclose(expected(d_V), reverse, atol=1e-12)
    np.testing.assert_allclose(expected(1 - np.exp(-d_V)), p_V - q_V, atol=1e-12)
    np.testing.assert_allclose(expected(np.ones(7)), 0, atol=1e-12)


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
@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_does_not_count_poisons_nothing(
    name: str, junk: float, monkeypatch: pytest.MonkeyPatch
):
    """verl PR#6349 and tunix: value * mask keeps NaN."""
    case, objective = make(2), OBJECTIVES[name]
    silent_BT = ~counted(case)
    advantage_A = np.where(case.weight_A > 0, case.advantage_A, np.float32(junk))
    reference_BT = np.where(silent_BT, np.float32(junk), case.reference_BT)
    planted = case._replace(advantage_A=advantage_A, reference_BT=reference_BT)
    for array in ("logp_BT", "temperature_BT"):
        junk_BT = np.where(silent_BT, np.float32(junk), getattr(case.rows, array))
        assert_same(run(planted, objective, **{array: junk_BT}), run(case, objective))
    # The gradient with respect to the log-probabilities alone, with junk in the learner's too.
    monkeypatch.setattr(loss, "token_scores", lambda logp_BT, *_, **__: (logp_BT, logp_BT))
    learners_BT = of_ids(distributions(case), case.rows.ids_BT)
    theirs_BT, logp_BT = (
        np.where(silent_BT, junk, x).astype(np.float32) for x in (case.rows.logp_BT, learners_BT)
    )
    rows = dataclasses.replace(case.rows, logp_BT=theirs_BT)
    given = (rows, objective, advantage_A, case.weight_A, reference_BT)
    slope_BT = jax.grad(lambda x: policy_loss(x, *given)[0])(logp_BT)
    wanted_n = reference(case, objective).slope_n
    np.testing.assert_allclose(
        slope_BT[~silent_BT], wanted_n, rtol=1e-5, atol=1e-5 * np.abs(wanted_n).max()
    )
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
    assert_same(got, (0.0, Sums(*[0.0] * 9), np.zeros_like(HEAD_DV)))  # and so no NaN


# --- scores ---------------------------------------------------------------------------------------


def test_ids_beyond_the_vocabulary_do_not_exist():
    """As if the model's logits ended before them."""
    case, rows = make(5), make(5).rows
    scores = jax.jit(token_scores, static_argnames=("config", "vocab_size"))
    logp_BT, entropy_BT = scores(PARAMS, CONFIG, rows, rows.segment_BT >= 0, vocab_size=KNOWN)
    cut_BTV = distributions(case)[..., :KNOWN]
    predicted_BT = rows.position_BT > 0
    for got_BT, wanted_BT in (
        (logp_BT, of_ids(cut_BTV, rows.ids_BT)),
        (entropy_BT, -np.sum(np.exp(cut_BTV) * cut_BTV, axis=-1)),
    ):
        np.testing.assert_allclose(got_BT, np.where(predicted_BT, wanted_BT, 0.0), atol=1e-5)
        assert (np.asarray(got_BT)[~predicted_BT] == 0.0).all()
