"""What processes of one job tell each other: over the real key-value store, and alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness_s_jax.hosts import ADDRESS, HostError, Hosts, join

pytestmark = pytest.mark.stack
ROOT = Path(__file__).parents[1]


def test_alone_there_is_nobody_to_wait_for():
    hosts = Hosts("test", 0.0)
    assert (hosts.index, hosts.count, hosts.first) == (0, 1, True)
    assert hosts.share({"a": 1}) == [{"a": 1}]
    assert hosts.tell(lambda: [2]) == [2]


def test_half_an_address_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ADDRESS, "127.0.0.1:1")
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    with pytest.raises(HostError, match=r"^got JAX_COORDINATOR_ADDRESS without JAX_NUM_PROCESSES"):
        join(distributed=False)


def test_three_processes_share_and_say_who_did_not_come():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), ADDRESS: address}
    running = [
        subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env=env | {"JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": str(index)},
        )
        for index in range(3)
    ]  # fmt: skip
    answers = [
        json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in running
    ]
    assert [process.returncode for process in running] == [0, 0, 0]
    for index, answer in enumerate(answers):
        assert answer["index"] == index
        assert answer["rounds"] == [[f"{n}.{host}" for host in range(3)] for n in range(40)]
        assert answer["told"] == "of 0"
        assert answer["large"] == 300_000
    # The last round host 2 stayed away from.
    for answer in answers[:2]:
        assert answer["error"].startswith("host 2 of 3 did not come within 1 s (")
        assert "goes on from its last checkpoint" in answer["error"]


def main() -> None:
    import jax

    from harness_s_jax import hosts as module

    join(distributed=False)
    module.SPARE_S = 30.0
    hosts, rounds = Hosts("test", 0.0), []
    for n in range(40):
        time.sleep(0.01 * ((hosts.index + n) % 3))
        rounds.append(hosts.share(f"{n}.{hosts.index}"))
    answer = {
        "index": hosts.index,
        "rounds": rounds,
        "told": hosts.tell(lambda: f"of {hosts.index}"),
        "large": len(hosts.share("x" * 100_000)[1]) * 3,
    }
    module.SPARE_S = 1.0
    other = Hosts("other", 0.0)
    if other.index < 2:
        try:
            other.share(None)
        except HostError as e:
            answer["error"] = str(e)
    print(json.dumps(answer))
    sys.stdout.flush()
    hosts.share("all have seen it")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
