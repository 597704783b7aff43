"""One update against numpy, what must leave no trace, and that nothing compiles after the build."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness_s_jax import metrics, types
from harness_s_jax.batch import train_batch
from harness_s_jax.learner import step
from harness_s_jax.learner.loss import Objective, Sums
from harness_s_jax.learner.scores import token_scores
from harness_s_jax.model import qwen3_5, shard
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.rows import PackedRows, TrainBatch
from harness_s_jax.types import Group, Outcome, Segment

pytestmark = pytest.mark.stack

CONFIG = Qwen35Config(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
KNOWN, ROW, MICRO, ATTEMPTS = 37, 32, 4, 16
HYPER = step.Hyper(
    learning_rate=1e-2, warmup_updates=2, b1=0.9, b2=0.99, adam_eps=1e-8,
    weight_decay=0.1, max_grad_norm=6.0,
    baseline="mean", std="sample", eps=1e-3,
    objective=Objective(clip_low=0.2, clip_high=0.3, aggregation="attempt"),
)  # fmt: skip
MESH = shard.make_mesh()
PARAMS = jax.device_get(qwen3_5.init_params(CONFIG, jax.random.key(1)))
PARAMS["embed_VD"] = PARAMS["embed_VD"] * 0.5  # a policy that is far from sure of anything

COMPILED: list[float] = []  # every compilation of this process


def _hear(event: str, seconds: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_hear)


fresh = functools.partial(step.init_state, PARAMS, HYPER, MESH)


@functools.cache
def learner(objective: Objective = HYPER.objective) -> step.Learner:
    return step.build(
        fresh(), CONFIG, dataclasses.replace(HYPER, objective=objective), MESH,
        step.Shapes(vocab_size=KNOWN, attempts=ATTEMPTS, micro_rows=MICRO, row_tokens=ROW),
    )  # fmt: skip


def updated(
    learner: step.Learner, state: step.State, given: TrainBatch, reference: Any = None
) -> tuple[step.State, Any]:
    """The state after an update, and its metrics."""
    state, outcome = step.update(learner, state, given, reference)
    return state, step.report(outcome)


# --- batches --------------------------------------------------------------------------------------


def segment(rng: np.random.Generator) -> Segment:
    """Log-probabilities are about those of a policy that knows nothing: ratios are near 1."""
    length = int(rng.integers(6, ROW))
    sampled_T = (np.arange(length) > 2) & (rng.random(length) < 0.7)
    ids_T = rng.integers(0, KNOWN, length, dtype=np.int32)
    logp_T = np.where(sampled_T, rng.normal(-math.log(KNOWN), 0.3, length), 0.0).astype(np.float32)
    temperature_T = np.where(sampled_T, 0.9, 0.0).astype(np.float32)
    return Segment(ids_T, sampled_T, logp_T, temperature_T, np.where(sampled_T, 0, -1))


def group(name: str, outcomes: str, seed: int) -> Group:
    """A letter for each attempt: solved, failed, x lost to infrastructure."""
    rng = np.random.default_rng(seed)
    task = types.Task(f"fake/train/{name}", "fake", "train", name, "Do it.", 3)
    kinds = {"s": Outcome.SOLVED, "f": Outcome.FAILED, "x": Outcome.INFRA}
    attempts = [
        types.Trajectory(
            types.AttemptKey(0, "train", 1, task.id, n), task, "h0", "",
            () if letter == "x" else (segment(rng),), (), kinds[letter], float(letter == "s"),
        )
        for n, letter in enumerate(outcomes)
    ]  # fmt: skip
    return Group(name, task, "initial", tuple(attempts))


def batch(*outcomes: str, seed: int = 0) -> TrainBatch:
    groups = [group(str(i), letters, 10 * seed + i) for i, letters in enumerate(outcomes)]
    return train_batch(groups, attempts=ATTEMPTS, row_tokens=ROW, micro_rows=MICRO)


def with_logp(given: TrainBatch, logp: Any) -> TrainBatch:
    """With other log-probabilities of the sampler's: `logp` of each micro-batch's rows."""
    rows = tuple(dataclasses.replace(rows, logp_BT=logp(rows)) for rows in given.rows)
    return dataclasses.replace(given, rows=rows)


TEACHES = ("sfff", "ssff", "ffff", "sxfs")
NOTHING = [(), ("ssss", "ffff"), ("sxxx", "xxxx"), ("s", "f", "s")]


# --- the reference --------------------------------------------------------------------------------


def tree_map(function: Any, *trees: Any) -> Any:
    """Over float64 numpy leaves."""
    return jax.tree.map(
        lambda *leaves: function(*(np.asarray(x, np.float64) for x in leaves)), *trees
    )


def norm(tree: Any) -> float:
    return math.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(tree)))


def assert_same(got: Any, wanted: Any, tolerance: float = 0.0) -> None:
    """Every leaf, up to a share of the largest value of the whole tree; by default bit for bit."""
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(wanted))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance * scale)


def weigh(given: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """Sample std, and every attempt alike, in float64."""
    advantage_A, weight_A = np.zeros(ATTEMPTS), np.zeros(ATTEMPTS)
    for number in set(given.group_A.tolist()) - {-1}:
        members = given.group_A == number
        rewards = given.reward_A[members].astype(np.float64)
        if rewards.min() < rewards.max():
            spread = rewards.std(ddof=1) + HYPER.eps
            advantage_A[members] = (rewards - rewards.mean()) / spread
            weight_A[members] = 1.0 / given.tokens_A[members]
    return advantage_A, weight_A / max(1, np.count_nonzero(weight_A))


def gradient(
    params: Any, given: TrainBatch, objective: Objective = HYPER.objective, reference: Any = None
) -> tuple[Any, Sums]:
    """Of the loss over all rows, by the programs that the update calls."""
    programs = learner(objective)
    weights = programs.weigh(given.reward_A, given.group_A, given.tokens_A)
    carry = programs.blank()
    for rows in given.rows:
        ref_BT = None if programs.score is None else programs.score(reference, rows)
        carry = programs.accumulate(params, carry, rows, *weights, ref_BT)
    return jax.device_get(carry)


class Adam:
    """AdamW behind a clip by the global norm, in float64, as its papers write it."""

    def __init__(self) -> None:
        self.params = tree_map(np.copy, PARAMS)
        self.mean = self.square = tree_map(np.zeros_like, PARAMS)
        self.count = 0

    def update(self, grads: Any) -> None:
        self.count += 1
        clip = min(1.0, HYPER.max_grad_norm / norm(grads))
        rate = HYPER.learning_rate * min(1.0, self.count / HYPER.warmup_updates)
        b1, b2, n = 0.9, 0.99, self.count
        self.mean = tree_map(lambda m, g: b1 * m + (1 - b1) * clip * g, self.mean, grads)
        self.square = tree_map(lambda v, g: b2 * v + (1 - b2) * (clip * g) ** 2, self.square, grads)

        def step_of(p: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
            towards = m / (1 - b1**n) / (np.sqrt(v / (1 - b2**n)) + 1e-8)
            return p - rate * (towards + HYPER.weight_decay * p)

        self.params = tree_map(step_of, self.params, self.mean, self.square)


# --- an update ------------------------------------------------------------------------------------


def test_updates_are_numpys_adamw():
    state, adam, norms = fresh(), Adam(), []
    for seed in range(4):
        given = batch(*TEACHES, seed=seed)
        grads, _ = gradient(state.params, given)
        state, report = updated(learner(), state, given)
        adam.update(grads)
        norms.append(norm(grads))
        assert report["learner/grad_norm"] == pytest.approx(norms[-1], rel=1e-5)
        change = tree_map(np.subtract, state.params, PARAMS)
        assert_same(change, tree_map(np.subtract, adam.params, PARAMS), 1e-4)
    assert min(norms) < HYPER.max_grad_norm < max(norms)  # the clip binds, and does not


def test_the_gradient_is_the_slope_of_the_loss():
    """Of every parameter: the loss falls along it as it says (in float32, to half a percent)."""
    given = batch(*TEACHES)
    grads, _ = gradient(PARAMS, given)
    length = 3e-5 / norm(grads)
    moved = (jax.tree.map(lambda p, g, s=s: p + s * length * g, PARAMS, grads) for s in (1, -1))
    up, down = (float(gradient(params, given)[1].loss) for params in moved)
    assert (up - down) / (2 * length) == pytest.approx(norm(grads) ** 2, rel=5e-3)


def test_attempts_are_weighed_as_the_settings_say():
    given = batch(*TEACHES)
    advantage_A, weight_A = learner().weigh(given.reward_A, given.group_A, given.tokens_A)
    np.testing.assert_allclose(advantage_A, weigh(given)[0], atol=1e-6)
    np.testing.assert_allclose(weight_A, weigh(given)[1], atol=1e-7)


def test_micro_batches_are_one_batch():
    whole = batch("sfsf")
    (rows,) = whole.rows
    parts = [PackedRows.empty(MICRO, ROW) for _ in range(2)]
    for part, own in zip(parts, ([1], [0, 2, 3]), strict=True):
        for name in vars(part):
            getattr(part, name)[: len(own)] = getattr(rows, name)[own]
        assert part.sampled_BT.any()
    split = dataclasses.replace(whole, rows=tuple(parts))
    one, two = (gradient(PARAMS, given) for given in (whole, split))
    assert_same(two[0], one[0], 1e-6)
    one, two = (updated(learner(), fresh(), given) for given in (whole, split))
    assert_same(two[0].params, one[0].params, 1e-5)
    assert two[1] == pytest.approx(one[1], rel=1e-5)


# --- what must leave no trace ---------------------------------------------------------------------


@pytest.mark.parametrize("outcomes", NOTHING, ids=["no group", "flat", "lost", "groups of one"])
def test_a_batch_that_teaches_nothing_is_no_update(outcomes: tuple[str, ...]):
    """In verl and SkyRL a group of one had its raw reward as advantage."""
    state, _ = updated(learner(), fresh(), batch(*TEACHES))
    before = jax.tree.map(np.array, state)
    state, report = updated(learner(), state, batch(*outcomes))
    assert_same(state, before)  # the optimizer's state and count too
    assert report == {"learner/updated": 0.0, "learner/skipped": 0.0}
    after, _ = updated(learner(), state, batch(*TEACHES, seed=1))
    other, _ = updated(learner(), fresh(), batch(*TEACHES))
    assert_same(after, updated(learner(), other, batch(*TEACHES, seed=1))[0])


@pytest.mark.parametrize("how", ["nothing sampled", "only padding", "nobody taught"])
def test_an_all_masked_batch_has_finite_zero_gradients_everywhere(how: str):
    """In all parameters (loss_test.py looks at one matrix), whatever the sampler's numbers are."""
    given = batch(*TEACHES)
    weights = [x.astype(np.float32) for x in weigh(given)]
    rows = dataclasses.replace(given.rows[0], logp_BT=np.full((MICRO, ROW), np.nan, np.float32))
    masked = {
        "nothing sampled": dataclasses.replace(rows, sampled_BT=np.zeros_like(rows.sampled_BT)),
        "only padding": PackedRows.empty(MICRO, ROW),
    }
    rows, weights = masked.get(how, rows), [x * (how in masked) for x in weights]
    grads, sums = learner().accumulate(PARAMS, learner().blank(), rows, *weights, None)
    assert_same(grads, jax.tree.map(np.zeros_like, PARAMS))  # and so no NaN
    assert_same(sums, Sums(*[0.0] * len(Sums._fields)))


@pytest.mark.parametrize("junk", [np.nan, -np.inf])
def test_an_update_that_is_not_finite_is_skipped(junk: float):
    """By one sampled token's log-probability, on top of moments and a count that must stay too."""

    def planted(rows: PackedRows) -> np.ndarray:
        logp_BT = rows.logp_BT.copy()
        logp_BT[tuple(np.argwhere(rows.sampled_BT)[-1])] = junk
        return logp_BT

    given = batch(*TEACHES, seed=1)
    state, _ = updated(learner(), fresh(), batch(*TEACHES))
    before = jax.tree.map(np.array, state)
    state, report = updated(learner(), state, with_logp(given, planted))
    assert_same(state, before)
    assert (report["learner/updated"], report["learner/skipped"]) == (0.0, 1.0)
    assert not math.isfinite(report["learner/grad_norm"])
    state, report = updated(learner(), state, given)  # and it goes on as if nothing had been
    assert (report["learner/updated"], report["learner/skipped"]) == (1.0, 0.0)
    other, _ = updated(learner(), fresh(), batch(*TEACHES))
    assert_same(state, updated(learner(), other, given)[0])


def test_a_copy_outlives_the_update():
    """The sampler holds it by reference while the learner's own arrays are donated."""
    state, copies = fresh(), []
    for seed in range(3):
        copies.append(shard.local_copy(MESH, state.params, "float32"))
        old = state
        state, _ = updated(learner(), state, batch(*TEACHES, seed=seed))
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
    # The same again, since reading an array as numpy's would keep it from being donated.
    state = fresh()
    for seed, copy in enumerate(copies):
        assert_same(copy, state.params)
        state, _ = updated(learner(), state, batch(*TEACHES, seed=seed))
    assert np.abs(np.subtract(copies[1]["embed_VD"], copies[0]["embed_VD"])).max() > 1e-3


def test_a_copy_casts_what_the_forward_casts():
    """Matrices to the model's dtype; vectors stay float32: both compute with equal values."""
    copy = shard.local_copy(MESH, fresh().params, "bfloat16")
    for path, x in jax.tree_util.tree_flatten_with_path(copy)[0]:
        assert x.dtype == ("bfloat16" if shard.is_matrix(path[-1].key) else "float32"), path
    rows = batch(*TEACHES).rows[0]
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    forward = jax.jit(qwen3_5.forward, static_argnums=1)
    hidden = [
        forward(params, config, rows.ids_BT, rows.segment_BT, rows.position_BT)
        for params in (PARAMS, copy)
    ]
    assert_same(*hidden)


# --- compilation, and what is told ----------------------------------------------------------------


def test_nothing_compiles_after_the_build():
    """Whatever the number of rows, micro-batches, groups and attempts."""
    state = fresh()
    shard.local_copy(MESH, state.params, "float32")
    plans = [("sf",), TEACHES, ("sfff",) * 4, (), ("ffff",), ("sx", "sf"), ("s" + "f" * 15,)]
    batches = [batch(*plan, seed=i) for i, plan in enumerate(plans)]
    assert {len(b.rows) for b in batches} >= {0, 1, 2, 3}
    assert learner().compiled == 4
    before = len(COMPILED)
    for given in batches:
        state = updated(learner(), state, given)[0]
        shard.local_copy(MESH, state.params, "float32")
    assert len(COMPILED) == before
    jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) * 3)(np.float32(before)))
    assert len(COMPILED) == before + 1  # the counter does count


def test_fifty_random_batches_compile_nothing():
    """Groups, attempts, segments and rows as chance has it; tunix compiled for 8.5 s when a token
    budget went from 16 to 17."""
    rng, state, report = np.random.default_rng(8), fresh(), {}
    plans = [
        ["".join(rng.choice(list("sfx"), rng.integers(1, 6))) for _ in range(rng.integers(0, 4))]
        for _ in range(50)
    ]
    batches = [batch(*plan, seed=100 + i) for i, plan in enumerate(plans)]
    assert len({(len(b.rows), len(plan)) for b, plan in zip(batches, plans, strict=True)}) > 6
    for given in (batch(*TEACHES), batch()):  # warm-up
        state, report = updated(learner(), state, given)
    before = len(COMPILED)
    for given in batches:
        state, report = updated(learner(), state, given)
        assert report["learner/updated"] == float(bool(given.rows))
    assert len(COMPILED) == before
    jax.block_until_ready(jax.jit(lambda x: jnp.cos(x) * 5)(np.float32(before)))
    assert len(COMPILED) == before + 1


def test_another_shape_is_an_error():
    given = dataclasses.replace(batch(*TEACHES), rows=(PackedRows.empty(MICRO + 1, ROW),))
    with pytest.raises(TypeError, match="compiled"):
        updated(learner(), fresh(), given)


def test_every_declared_metric_is_reported_and_true():
    given = batch(*TEACHES)
    (_, sums), (_, report) = gradient(PARAMS, given), updated(learner(), fresh(), given)
    assert set(report) == {name for name in metrics.METRICS if name.startswith("learner/")}
    high, low = float(sums.log_ratio_high), float(sums.log_ratio_low)
    assert all(type(value) is float and math.isfinite(value) for value in report.values())
    tokens = sum(rows.sampled_BT.sum() for rows in given.rows)
    wanted = {
        "updated": 1, "skipped": 0, "loss": sums.loss, "tokens": tokens,
        "entropy": sums.entropy / tokens,
        "kl_to_sampler": sums.kl / tokens, "clipped_fraction": sums.clipped / tokens,
        "kl_to_reference": 0.0, "corrected_fraction": 0.0, "ratio_max": math.exp(high),
        "ratio_min": math.exp(low), "logp_gap_max": max(high, -low),
        "grad_norm": report["learner/grad_norm"],
    }  # fmt: skip
    assert report == pytest.approx({f"learner/{k}": float(v) for k, v in wanted.items()}, rel=1e-5)
    assert 0 < report["learner/entropy"] <= math.log(KNOWN)
    assert 0 < report["learner/clipped_fraction"] < 1


# --- the penalty, and corrections -----------------------------------------------------------------

PENALISED = dataclasses.replace(HYPER.objective, kl=20.0)
TRUNCATED = dataclasses.replace(HYPER.objective, correction="truncate", correction_high=1.3)


@jax.jit
def own_logp(rows: PackedRows) -> jax.Array:
    """Log-probabilities of what was sampled under the parameters that training begins with."""
    return token_scores(PARAMS, CONFIG, rows, rows.sampled_BT, vocab_size=KNOWN)[0]


def test_a_program_scores_the_reference_only_where_there_is_a_penalty():
    assert learner().score is None
    assert learner().compiled == 4
    assert learner(PENALISED).score is not None
    assert learner(PENALISED).compiled == 5


def test_the_reference_is_the_policy_that_training_began_with():
    """Whatever becomes of the parameters it was copied from."""
    state, penalised = fresh(), learner(PENALISED)
    reference, given = step.reference_of(state.params, CONFIG, MESH), batch(*TEACHES)
    wanted = own_logp(given.rows[0])
    assert np.abs(wanted).max() > 1
    for _ in range(2):
        got = penalised.score(reference, penalised.place(given.rows[0]))
        np.testing.assert_allclose(got, wanted, atol=1e-5)
        state, _ = updated(penalised, state, given, reference)


def test_the_penalty_has_no_gradient_at_the_reference():
    given, state = batch(*TEACHES), fresh()
    reference = step.reference_of(state.params, CONFIG, MESH)
    (grads, sums), (wanted, _) = (
        gradient(PARAMS, given, PENALISED, reference),
        gradient(PARAMS, given),
    )
    assert_same(grads, wanted, 1e-5)
    assert float(sums.kl_reference) == pytest.approx(0.0, abs=1e-6)


def test_the_penalty_moves_the_policy_back_to_the_reference():
    reference = step.reference_of(fresh().params, CONFIG, MESH)
    given = batch(*TEACHES)

    def distances(objective: Objective) -> list[float]:
        """KL to the reference around ten updates that begin away from it."""
        state = fresh()
        for _ in range(3):
            state, _ = updated(learner(), state, given)
        state, found = step.State(state.params, fresh().opt_state), []
        for _ in range(10):
            found.append(float(gradient(state.params, given, PENALISED, reference)[1].kl_reference))
            state, _ = updated(learner(objective), state, given, reference)
        return found

    penalised, free = distances(PENALISED), distances(HYPER.objective)
    assert penalised[0] == free[0] > 0.1
    assert penalised[-1] < penalised[0] / 3
    assert free[-1] > free[0]


@pytest.mark.parametrize("objective", [HYPER.objective, PENALISED], ids=["plain", "penalised"])
def test_groups_without_spread_are_in_no_denominator_and_have_no_penalty(objective: Objective):
    """trl#6367 and trl PR#7068, far from the reference; so too groups of one and lost attempts."""
    state, _ = updated(learner(), fresh(), batch(*TEACHES, seed=3))
    params = jax.tree.map(np.array, state.params)
    reference = step.reference_of(fresh().params, CONFIG, MESH)
    few, many = batch("sffs"), batch("sffs", "ffff", "ss", "x", "f", "xx")
    assert few.tokens_A.sum() < many.tokens_A.sum()
    one, two = (gradient(params, given, objective, reference) for given in (few, many))
    assert_same(one[0], two[0])
    assert one[1] == two[1]
    assert one[1].kl_reference > 0 or objective is not PENALISED


@pytest.mark.parametrize(("shift", "factor", "cut"), [(0.0, 1, 0), (0.5, 1.3, 1), (-0.5, None, 0)])
def test_a_truncated_correction_weighs_every_token(shift: float, factor: float | None, cut: int):
    """Of tokens that the learner finds exp(shift) times as likely as the sampler did, by as much,
    up to the bound; the clip, which would drop them, has no part in it."""
    given = with_logp(
        batch(*TEACHES),
        lambda rows: np.where(rows.sampled_BT, own_logp(rows) - np.float32(shift), 0.0),
    )
    on_policy = with_logp(given, own_logp)
    factor = math.exp(shift) if factor is None else factor
    grads, wanted = gradient(PARAMS, given, TRUNCATED)[0], gradient(PARAMS, on_policy)[0]
    assert_same(grads, tree_map(lambda g: factor * g, wanted), 1e-5)
    _, report = updated(learner(TRUNCATED), fresh(), given)
    assert report["learner/grad_norm"] == pytest.approx(factor * norm(wanted), rel=1e-5)
    assert report["learner/corrected_fraction"] == cut
    assert report["learner/clipped_fraction"] == 0.0
    assert report["learner/ratio_max"] == pytest.approx(max(1.0, math.exp(shift)), rel=1e-4)
