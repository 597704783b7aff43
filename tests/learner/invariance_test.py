"""A step's gradients are the same whatever its micro-batches, rows, devices and processes.

Run as a program, this file is a process with eight devices, or one of two with four each, which
leaves gradients for the tests to compare.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from harness_s_jax import hosts
from harness_s_jax.batch import agreed, to_agree_on, train_batch
from harness_s_jax.learner import scores, step
from harness_s_jax.learner.loss import Objective
from harness_s_jax.model import qwen3_5, shard
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.rows import PackedRows, TrainBatch
from harness_s_jax.types import AttemptKey, Counted, Group, Outcome, Segment, Task, Trajectory

ROOT = Path(__file__).parents[2]
CONFIG = Qwen35Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    tie_word_embeddings=False,
)  # fmt: skip
KNOWN, ROW, ATTEMPTS = 61, 28, 48
PLAIN = Objective(clip_low=0.2, clip_high=0.3)
OBJECTIVES = {
    "plain": PLAIN,
    "everything": dataclasses.replace(  # what is summed over a segment or an attempt, too
        PLAIN, ratio="sequence", correction="truncate", correction_high=1.5,
        aggregation="attempt", kl=0.1,
    ),
}  # fmt: skip
TOLERANCE = 1e-5  # of each tensor's largest gradient; of the issue: never loosened


class Case(NamedTuple):
    devices: int
    micro_rows: int  # of all processes together


BASE, EIGHT = Case(1, 4), Case(8, 8)
MICRO, DEVICES = [Case(1, 1), Case(1, 2)], [Case(2, 4), Case(4, 4), EIGHT]
# A case takes ten seconds to compile; all of them are made of one objective, in the slow tests.
CASES = {
    "plain": [BASE, MICRO[0], DEVICES[0], EIGHT],
    "everything": [BASE, *MICRO, *DEVICES],
}
# The attempts of each group, a letter each: solved, failed, x lost to infrastructure; None: random.
# In "one idle" one host of two has nothing to train on, in "both idle" neither.
PLANS = {
    "random": ("s", "ffff", "sffx", "xx", "fsfsf", None, None, None, None),
    "one idle": ("sffs", "ssss", "ff", "xsx", "sf", "f"),
    "both idle": ("ssss", "ff", "s", "x"),
}
TEACH = ["random", "one idle"]


# --- groups ---------------------------------------------------------------------------------------


def segment(rng: np.random.Generator) -> Segment:
    """Prompts, turns and observations anywhere; ratios are on both sides of the bounds."""
    length = int(rng.integers(6, ROW))
    sampled_T = (np.arange(length) > 2) & (rng.random(length) < 0.7)
    return Segment(
        ids_T=rng.integers(0, KNOWN, length, dtype=np.int32),
        sampled_T=sampled_T,
        logp_T=np.where(sampled_T, rng.normal(-5, 1, length), 0.0).astype(np.float32),
        temperature_T=np.where(sampled_T, rng.choice([0.8, 1.5]), 0.0).astype(np.float32),
        weight_version_T=np.where(sampled_T, 3, -1).astype(np.int32),
    )


@functools.cache
def groups(plan: str) -> tuple[Group, ...]:
    rng, made = np.random.default_rng(1), []
    kinds = {"s": Outcome.SOLVED, "f": Outcome.FAILED, "x": Outcome.INFRA}
    for g, letters in enumerate(PLANS[plan]):
        task = Task(f"fake/train/{g}", "fake", "train", str(g), "Do it.", 3)
        attempts = [
            Trajectory(
                AttemptKey(0, "train", 1, task.id, n), task, "h0", "",
                tuple(segment(rng) for _ in range(0 if x == "x" else rng.integers(1, 3))), (),
                kinds[x], float(x == "s"),
            )
            for n, x in enumerate(letters or rng.choice(list("sffx"), rng.integers(1, 7)))
        ]  # fmt: skip
        made.append(Group(str(g), task, "initial", tuple(attempts)))
    return tuple(made)


def known_to(host: int, plan: str) -> list[Group]:
    """The groups as one host of two has them: by turns, the third also attempt by attempt."""

    def seen(g: int, n: int, t: Trajectory) -> Trajectory:
        if (g + (n if g == 2 else 0)) % 2 == host:
            return t
        counted = Counted(t.sampled_tokens, t.context_tokens)
        return dataclasses.replace(t, segments=(), elsewhere=counted)

    return [
        dataclasses.replace(
            group, trajectories=tuple(seen(g, n, t) for n, t in enumerate(group.trajectories))
        )
        for g, group in enumerate(groups(plan))
    ]


def batch(plan: str, micro_rows: int, known: list[Group] | None = None) -> TrainBatch:
    given = list(groups(plan)) if known is None else known
    return train_batch(given, attempts=ATTEMPTS, row_tokens=ROW, micro_rows=micro_rows)


def alone(packed: TrainBatch, micro_rows: int) -> TrainBatch:
    """Every segment in a row of its own."""
    singles = []
    for rows in packed.rows:
        for b, segment_T in enumerate(rows.segment_BT):
            for number in range(segment_T.max() + 1):
                here = segment_T == number
                single = PackedRows.empty(1, ROW)
                for name, array in vars(single).items():
                    array[0, : here.sum()] = getattr(rows, name)[b, here]
                single.segment_BT[single.segment_BT >= 0] = 0
                singles.append(single)
    singles += [PackedRows.empty(1, ROW)] * (-len(singles) % micro_rows)
    micro = [singles[i : i + micro_rows] for i in range(0, len(singles), micro_rows)]
    names = vars(singles[0])
    stacked = [
        PackedRows(**{name: np.concatenate([getattr(s, name) for s in part]) for name in names})
        for part in micro
    ]
    return dataclasses.replace(packed, rows=tuple(stacked))


# --- what makes the gradients ---------------------------------------------------------------------


@functools.cache
def params() -> Any:
    """With embeddings of size 1, as after training: float32 loses few digits on them."""
    fresh = jax.device_get(qwen3_5.init_params(CONFIG, jax.random.key(1)))
    return fresh | {"embed_VD": fresh["embed_VD"] * 7}


class Programs:
    """The learner's programs of a case, and the penalty's parameters."""

    def __init__(self, objective: str, case: Case) -> None:
        hyper = step.Hyper(
            learning_rate=1e-2, warmup_updates=1, b1=0.9, b2=0.99, adam_eps=1e-8,
            weight_decay=0.1, max_grad_norm=1.0,
            baseline="mean", std="population", eps=1e-4, objective=OBJECTIVES[objective],
        )  # fmt: skip
        every = case.devices == jax.device_count()  # then in the order that make_mesh gives them
        self.mesh = shard.make_mesh(devices=None if every else jax.devices()[: case.devices])
        self.state = step.init_state(params(), hyper, self.mesh)
        shapes = step.Shapes(KNOWN, ATTEMPTS, case.micro_rows, ROW)
        self.learner = step.build(self.state, CONFIG, hyper, self.mesh, shapes)
        self.reference = None
        if self.learner.score is not None:
            other = params() | {"head_DV": params()["head_DV"] * 1.3}
            placed = step.init_state(other, hyper, self.mesh).params
            self.reference = step.reference_of(placed, CONFIG, self.mesh)

    def gradients(self, given: TrainBatch) -> dict[str, Any]:
        """Of every tensor, whole."""
        learner = self.learner
        weights = learner.weigh(given.reward_A, given.group_A, given.tokens_A)
        carry = learner.blank()
        for own in given.rows:
            rows = learner.place(own)
            ref_BT = None if learner.score is None else learner.score(self.reference, rows)
            carry = learner.accumulate(self.state.params, carry, rows, *weights, ref_BT)
        return flat(shard.local_copy(self.mesh, carry[0], "float32"))

    def updated(self, given: TrainBatch) -> dict[str, float]:
        """The metrics of an update of the state."""
        self.state, outcome = step.update(self.learner, self.state, given, self.reference)
        return step.report(outcome)

    def whole(self) -> dict[str, Any]:
        return flat(shard.local_copy(self.mesh, self.state.params, "float32"))


def flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(key.key for key in path): np.asarray(x) for path, x in leaves}


def one_process(objective: str, out: Path) -> None:
    for case in CASES[objective]:
        programs = Programs(objective, case)
        for plan in TEACH if case == EIGHT else TEACH[:1]:
            save(out, case, plan, programs.gradients(batch(plan, case.micro_rows)))
        if case == BASE:
            packed = batch("random", case.micro_rows)
            save(out, case, "alone", programs.gradients(alone(packed, case.micro_rows)))
            # As workers do that average what each of them averaged over its own.
            halves = [batch("random", case.micro_rows, known_to(host, "random")) for host in (0, 1)]
            one, other = map(programs.gradients, halves)
            save(out, case, "mean of means", {n: (one[n] + other[n]) / 2 for n in one})
        if case == EIGHT:
            reports = {plan: programs.updated(batch(plan, case.micro_rows)) for plan in PLANS}
            (out / "one.json").write_text(json.dumps(reports))


def one_of_two(objective: str, out: Path) -> None:
    hosts.join(False)
    job = hosts.Hosts("test", 60.0)
    assert (job.count, jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    programs, micro_rows = Programs(objective, EIGHT), EIGHT.micro_rows // job.count
    given, facts = {}, {}
    for plan in PLANS:
        own = batch(plan, micro_rows, known_to(job.index, plan))
        told = job.share(to_agree_on(own))
        given[plan] = agreed(own, told, row_tokens=ROW, micro_rows=micro_rows)
        packed = dataclasses.asdict(given[plan].packed)
        facts[plan] = {"own": len(own.rows), "arrays": arrays(given[plan]), "packed": packed}
    for plan in TEACH:
        save(out, EIGHT, f"{plan} {job.index}", programs.gradients(given[plan]))
    for plan in PLANS:
        facts[plan]["report"] = programs.updated(given[plan])
    save(out, EIGHT, f"updated {job.index}", programs.whole())
    (out / f"{job.index}.json").write_text(json.dumps(facts))


def save(out: Path, case: Case, what: str, tensors: dict[str, Any]) -> None:
    np.savez(out / name_of(case, what), **tensors)


def name_of(case: Case, what: str) -> str:
    return f"{what} {case.devices} {case.micro_rows}.npz"


def arrays(given: TrainBatch) -> list[Any]:
    return [x.tolist() for x in (given.reward_A, given.group_A, given.tokens_A)]


# --- the tests ------------------------------------------------------------------------------------


class Started(NamedTuple):
    objective: str
    out: Path
    one: list[subprocess.Popen[str]]
    two: list[subprocess.Popen[str]]


def start(objective: str, out: Path, devices: int, **names: str) -> subprocess.Popen[str]:
    environment = os.environ | names | {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }  # fmt: skip
    command = [sys.executable, __file__, objective, str(out)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


@pytest.fixture(
    scope="module", params=["plain", pytest.param("everything", marks=pytest.mark.slow)]
)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """All processes of an objective, side by side."""
    out = tmp_path_factory.mktemp("gradients")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    names = {hosts.ADDRESS: address, "JAX_NUM_PROCESSES": "2"}
    two = [start(request.param, out, 4, **names, JAX_PROCESS_ID=str(n)) for n in (0, 1)]
    processes = Started(request.param, out, [start(request.param, out, 8)], two)
    yield processes
    for process in (*processes.one, *processes.two):
        process.kill()
        process.wait()


def finished(out: Path, processes: list[subprocess.Popen[str]]) -> Path:
    said = [process.communicate(timeout=300)[1] for process in processes]
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-3000:]
    return out


@pytest.fixture(scope="module")
def cases(started: Started) -> list[Case]:
    return CASES[started.objective]


@pytest.fixture(scope="module")
def one(started: Started) -> Path:
    """What a process with eight devices left."""
    return finished(started.out, started.one)


@pytest.fixture(scope="module")
def two(started: Started) -> Path:
    """What two processes with four devices each left."""
    return finished(started.out, started.two)


def apart(one: Path, other: Path) -> float:
    """Over the tensors, the largest difference relative to the tensor's largest gradient."""
    with np.load(one) as a, np.load(other) as b:
        assert set(a.files) == set(b.files)
        assert len(a.files) > 20
        assert all(np.abs(a[name]).max() > 0 for name in a.files)
        return max(np.abs(a[name] - b[name]).max() / np.abs(a[name]).max() for name in a.files)


def test_the_groups_are_of_every_kind():
    """And the hosts' shares of them differ, in micro-batches too."""
    members = [[t.outcome.value for t in group.trajectories] for group in groups("random")]
    assert [] not in members
    assert min(map(len, members)) == 1
    assert any("infra" in m and {"solved", "failed"} <= {*m} for m in members)
    assert any(len(m) > 1 and len({*m}) == 1 for m in members)
    assert sum({"solved", "failed"} <= {*m} for m in members) >= 4
    rows = [len(batch("random", 4, known_to(host, "random")).rows) for host in (0, 1)]
    assert 1 <= min(rows) < max(rows)
    assert [len(batch("one idle", 4, known_to(host, "one idle")).rows) for host in (0, 1)] == [2, 0]
    assert batch("both idle", 4).rows == ()
    packed = batch("random", 4)
    assert len(packed.rows) >= 3
    assert (alone(packed, 4).rows[0].segment_BT <= 0).all()
    sampled = (sum(r.sampled_BT.sum() for r in b.rows) for b in (packed, alone(packed, 4)))
    assert [*sampled] == [packed.packed.trained_tokens] * 2


def test_gradients_are_the_same_in_other_micro_batches(one: Path, cases: list[Case]):
    """trl#3021: accumulation changes no scale."""
    for case in [case for case in MICRO if case in cases]:
        gap = apart(one / name_of(BASE, "random"), one / name_of(case, "random"))
        assert gap <= TOLERANCE, case


def test_gradients_are_the_same_with_every_segment_alone(one: Path):
    """No segment sees, or is weighed by, what shares its row."""
    assert apart(one / name_of(BASE, "random"), one / name_of(BASE, "alone")) <= TOLERANCE


def test_gradients_are_the_same_on_more_devices(one: Path, cases: list[Case]):
    for case in [case for case in DEVICES if case in cases]:
        gap = apart(one / name_of(BASE, "random"), one / name_of(case, "random"))
        assert gap <= TOLERANCE, case


def test_a_mean_of_means_is_another_gradient(one: Path):
    """SkyRL PR#925, prime-rl PR#583: these tests would tell."""
    assert apart(one / name_of(BASE, "random"), one / name_of(BASE, "mean of means")) > 0.05


@pytest.mark.parametrize("plan", TEACH)
def test_gradients_are_the_same_in_two_processes(one: Path, two: Path, plan: str):
    """SkyRL#1296, NeMo-RL#212: one count of tokens over all of them. verl PR#5228: a process with
    fewer rows than the other, or with none, keeps nobody waiting."""
    here, there = (two / name_of(EIGHT, f"{plan} {host}") for host in (0, 1))
    assert apart(one / name_of(EIGHT, plan), here) <= TOLERANCE
    assert apart(here, there) == 0.0


def test_two_processes_agree_on_the_batch_and_update_alike(one: Path, two: Path):
    wanted = json.loads((one / "one.json").read_text())
    here, there = (json.loads((two / f"{host}.json").read_text()) for host in (0, 1))
    own = {plan: [facts[plan].pop("own") for facts in (here, there)] for plan in PLANS}
    assert 0 < own["random"][1] < own["random"][0]
    assert own["one idle"][0] > own["one idle"][1] == 0
    assert own["both idle"] == [0, 0]
    assert here == there
    for plan, facts in here.items():
        whole = batch(plan, EIGHT.micro_rows)
        assert facts["arrays"] == arrays(whole)
        packed, all_ = facts["packed"], dataclasses.asdict(whole.packed)
        assert sorted(packed.pop("lengths")) == sorted(all_.pop("lengths"))
        assert packed == all_
        # Adam takes a gradient's sign first: later steps start from last digits blown up.
        rel = 1e-5 if plan == "random" else 1e-3
        assert facts["report"] == pytest.approx(wanted[plan], rel=rel, abs=1e-6)
    assert [here[plan]["report"]["learner/updated"] for plan in PLANS] == [1.0, 1.0, 0.0]
    assert apart(*(two / name_of(EIGHT, f"updated {host}") for host in (0, 1))) == 0.0


if __name__ == "__main__":
    scores.CHUNK_LOGITS = 6 * CONFIG.vocab_size  # several chunks, the last of which is not full
    child = one_of_two if hosts.ADDRESS in os.environ else one_process
    child(sys.argv[1], Path(sys.argv[2]))
