"""The processes of one job, one a host: what they tell each other outside the device programs.

Messages are small JSON texts in the key-value store of jax.distributed's coordination service. All
hosts call the same functions in the same order; one process alone is the same thing with nobody to
wait for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")
# What says that this process is one of several; where it is missing, a TPU pod, Slurm or GKE does.
ADDRESS = "JAX_COORDINATOR_ADDRESS"
SPARE_S = 600.0  # on top of what the slowest host may take: starting, compiling, writing


class HostError(Exception):
    """A host did not come to where the others wait; the sentence says which and what to do."""


def join(distributed: bool) -> None:
    """Makes this process one of the job's, if it was started as one; before anything else of jax.

    `distributed` asks for it where no environment variable does: on a TPU pod, Slurm or GKE jax
    finds the others itself.

    Raises:
      HostError: the others could not be reached.
    """
    if not (distributed or os.environ.get(ADDRESS)):
        return
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if os.environ.get(ADDRESS):
            jax.distributed.initialize(
                os.environ[ADDRESS],
                int(os.environ["JAX_NUM_PROCESSES"]),
                int(os.environ["JAX_PROCESS_ID"]),
            )
        else:
            jax.distributed.initialize()
    except KeyError as e:
        raise HostError(
            f"got {ADDRESS} without {e.args[0]}; a process of several needs {ADDRESS} (host:port "
            f"of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from None
    except (RuntimeError, ValueError) as e:
        first = str(e).strip().splitlines()[0]
        raise HostError(f"cannot join the other processes ({first}); start all of them") from None


class Hosts:
    """This process among those of the job, for messages on one subject.

    On every host there is one object for a subject, and none may be made twice.
    """

    def __init__(self, subject: str, patience_s: float) -> None:
        """`patience_s`: how long the slowest may be behind the fastest."""
        self._subject = subject
        self.index, self.count = jax.process_index(), jax.process_count()
        self._patience_ms = int(1000 * (patience_s + SPARE_S))
        self._round = 0

    @property
    def first(self) -> bool:
        """Whether this is the one that routes, writes files and speaks."""
        return self.index == 0

    def share(self, value: Any) -> list[Any]:
        """Every host's value (plain JSON data), in order of the hosts.

        Raises:
          HostError: a host did not bring its own in time.
        """
        if self.count == 1:
            return [value]
        client, here = _client(), self._round
        self._round += 1
        client.key_value_set(self._key(here, self.index), json.dumps(value))
        values = []
        for host in range(self.count):
            try:
                text = client.blocking_key_value_get(self._key(here, host), self._patience_ms)
            except jax.errors.JaxRuntimeError as e:
                raise HostError(
                    f"host {host} of {self.count} did not come within "
                    f"{self._patience_ms / 1000:.0f} s ({str(e).splitlines()[0]}); stop all "
                    f"processes and start them again: the run goes on from its last checkpoint"
                ) from None
            values.append(json.loads(text))
        if here:  # who brought this value has read all of the round before
            client.key_value_delete(self._key(here - 1, self.index))
        return values

    def tell(self, make: Callable[[], T]) -> T:
        """What the first host makes (plain JSON data), on all."""
        return self.share(make() if self.first else None)[0]

    def _key(self, number: int, host: int) -> str:
        return f"harness_s_jax/{self._subject}/{number}/{host}"


def _client() -> Any:
    # The store has no public name; Orbax takes the same way to it.
    from jax._src import distributed

    return distributed.global_state.client
