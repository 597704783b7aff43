"""Training as one job of two processes: attempt for attempt what one process does.

A child of this file trains with its attempts written down. Two of them with four devices each are
compared with one that has eight, so that the sharded programs are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness_s_jax import metrics

ROOT = Path(__file__).parents[1]
FLAGS = {
    "train.steps": 4, "train.tasks": 10, "train.task_pool": 400, "train.validate_every": 2,
    "train.validation_tasks": 5, "train.save_every": 1, "anchor.tasks": 5, "sampler.slots": 16,
    # Hosts pack their own rows, so gradients are added up in another order and weights differ in
    # their last bits: at a high temperature a token of thousands falls otherwise. Of a gradient
    # that is 0 but for rounding Adam would make a step of full size.
    "learner.hyper.adam_eps": 1e-3,
}  # fmt: skip
LATE_S = 60.0


class Job:
    """Processes that train one run together."""

    def __init__(self, workdir: Path, processes: int, *, late_s: float = 0.0):
        self.workdir, self.processes = workdir, processes
        workdir.mkdir(exist_ok=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        flags = [f"--config.{name}={value}" for name, value in FLAGS.items()]
        command = [sys.executable, __file__, "--stages=train", f"--workdir={workdir}", *flags]
        self.running = []
        for index in range(processes):
            env = {
                **os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(8 // processes),
                "PYTHONPATH": str(ROOT), "LATE_S": str(late_s if index == 1 else 0.0),
            }  # fmt: skip
            if processes > 1:
                env["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
                env |= {"JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(index)}
            with (workdir.parent / f"{workdir.name}.{index}.log").open("a") as log:
                self.running.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
                )

    @property
    def logs(self) -> list[str]:
        names = [f"{self.workdir.name}.{index}.log" for index in range(self.processes)]
        return [(self.workdir.parent / name).read_text() for name in names]

    def finish(self) -> None:
        for process in self.running:
            assert process.wait(540) == 0, self.logs

    def kill(self) -> None:
        for process in self.running:
            process.kill()
        for process in self.running:
            assert process.wait(60) == -signal.SIGKILL

    @property
    def attempts(self) -> dict[str, list[Any]]:
        """Every attempt by weights, key and harness: host, tokens, outcome."""
        rows = [
            row
            for file in sorted(self.workdir.glob("attempts.*.jsonl"))
            for row in metrics.read_lines(file)
        ]
        return {row["attempt"]: [row["host"], row["tokens"], row["outcome"]] for row in rows}

    @property
    def steps(self) -> int:
        rows = metrics.read_lines(self.workdir / "metrics.jsonl")
        return max((row.get("step", 0) for row in rows), default=0)


def assert_equal(one: Job, two: Job) -> None:
    """The same attempts, decisions and numbers, up to what sums in another order change."""
    attempts = [{name: row[1:] for name, row in job.attempts.items()} for job in (one, two)]
    assert attempts[0] == attempts[1]
    texts = [(job.workdir / "decisions.jsonl").read_bytes() for job in (one, two)]
    assert texts[0] == texts[1] != b""
    rows = [metrics.read_lines(job.workdir / "metrics.jsonl") for job in (one, two)]
    for a, b in zip(*rows, strict=True):
        assert a.get("step") == b.get("step")
        for name in a:
            if name.split("/")[0] in ("count", "rollout", "group", "rescue", "validation"):
                assert a[name] == b[name], name
            elif name in ("learner/loss", "learner/grad_norm", "learner/tokens"):
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Job:
    job = Job(tmp_path_factory.mktemp("hosts") / "alone", 1)
    job.finish()
    return job


@pytest.mark.slow
def test_two_processes_with_one_of_them_late_are_one_process(alone: Job, tmp_path: Path):
    begun = time.monotonic()
    two = Job(tmp_path / "two", 2, late_s=LATE_S)
    two.finish()
    assert time.monotonic() - begun > LATE_S
    assert_equal(alone, two)
    hosts = {name: row[0] for name, row in two.attempts.items()}
    assert set(hosts.values()) == {0, 1}
    keys = {name: name.partition("/")[2].rpartition("/")[0] for name in hosts}
    rescued = [hosts[name] for name, key in keys.items() if json.loads(key)[4] >= 4]
    print(f"\n{len(hosts)} attempts, of rescue {rescued.count(0)} on one host and "
          f"{rescued.count(1)} on the other")  # fmt: skip
    assert {0, 1} == set(rescued)
    # The failed groups of some step were not as many on one host as on the other.
    initial = {tuple(json.loads(key)[2:4]): hosts[name] for name, key in keys.items()
               if json.loads(key)[1] == "train" and json.loads(key)[4] < 4}  # fmt: skip
    failed: dict[int, list[int]] = {}
    for row in metrics.read_lines(two.workdir / "decisions.jsonl"):
        failed.setdefault(row["step"], []).append(initial[row["step"], row["task"]])
    assert any(on.count(0) != on.count(1) for on in failed.values())


@pytest.mark.slow
def test_two_processes_killed_and_gone_on_with_by_one_are_one_process(alone: Job, tmp_path: Path):
    """A checkpoint of one mesh and number of processes is another's (verl PR#5725 and others)."""
    two = Job(tmp_path / "two", 2)
    while two.steps < 2:
        assert all(process.poll() is None for process in two.running), two.logs
        time.sleep(0.05)
    two.kill()
    done = two.steps
    one = Job(tmp_path / "two", 1)
    one.finish()
    assert f"train: goes on after step {done}" in one.logs[0].replace(
        f"after step {done - 1}", f"after step {done}"
    )
    assert_equal(alone, one)


# --- the child ------------------------------------------------------------------------------------


def main() -> None:
    from experiments import appworld_4b, launcher
    from harness_s_jax import train
    from harness_s_jax.rollout import group

    run_attempt, run_counted = group.run_attempt, train.run_counted
    host, late_s = os.environ.get("JAX_PROCESS_ID", "0"), float(os.environ["LATE_S"])
    (workdir,) = (a.partition("=")[2] for a in sys.argv if a.startswith("--workdir="))

    async def kept(spec: Any, task: Any, key: Any, setting: Any) -> Any:
        trajectory = await run_attempt(spec, task, key, setting)
        tokens = b"".join(s.ids_T.tobytes() for s in trajectory.segments)
        row = {
            "attempt": f"{setting.policy.weight_version}/{key}/{spec.id}", "host": int(host),
            "outcome": trajectory.outcome.value,
            "tokens": hashlib.sha256(tokens).hexdigest(),
        }  # fmt: skip
        with (Path(workdir) / f"attempts.{host}.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
        return trajectory

    def slow(config: Any, parts: Any, hosts: Any, cost: Any, phase: Any, jobs: Sequence[Any]):
        if (phase.step, phase.purpose) == (2, "initial"):
            asyncio.run(asyncio.sleep(late_s))
        return run_counted(config, parts, hosts, cost, phase, jobs)

    group.run_attempt, train.run_counted = kept, slow
    launcher.main(appworld_4b.__file__, appworld_4b.STAGES, appworld_4b.launcher.choose_variant)


if __name__ == "__main__":
    main()
