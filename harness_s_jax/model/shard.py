"""Which mesh axis each dimension lives on: one table, by the letters in an array's name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Letter of a name's suffix -> mesh axis. Vectors (norms, gates a head) are whole on every device.
AXIS_OF = {"B": "fsdp", "D": "fsdp", "V": "tensor", "P": "tensor", "F": "tensor"}


def make_mesh(tensor: int = 1) -> Mesh:
    """All devices of all processes as (fsdp, tensor).

    Raises:
      ValueError: the devices do not divide by `tensor`.
    """
    devices = np.array(jax.devices())
    if len(devices) % tensor:
        raise ValueError(
            f"got {len(devices)} devices for a tensor axis of {tensor}; it must divide"
        )
    return Mesh(devices.reshape(-1, tensor), ("fsdp", "tensor"))


def sharding_of(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Where an array with these suffix letters lives; leading dimensions without a letter, and
    dimensions that their axis does not divide, are whole."""
    letters = name.rpartition("_")[2] if "_" in name else ""
    if len(letters) < 2:
        return NamedSharding(mesh, PartitionSpec())
    inner = [
        axis if (axis := AXIS_OF.get(letter)) and size % mesh.shape[axis] == 0 else None
        for letter, size in zip(letters, shape[-len(letters) :], strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - len(letters)), *inner))


def shardings(mesh: Mesh, tree: Any) -> Any:
    """The shardings of a tree whose leaves are named by their last dictionary key: the parameters,
    or an optimizer's state of them. Other leaves are whole."""

    def of(path: Any, leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return sharding_of(mesh, names[-1] if names else "", np.shape(leaf))

    return jax.tree_util.tree_map_with_path(of, tree)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def local_copy(mesh: Mesh, params: Any) -> Any:
    """A copy of sharded parameters on one of this process's devices.

    One program over all processes, which all must enter, gathers them (contract 9a of the design);
    the copy outlives a donation of the originals.
    """
    return jax.tree.map(lambda array: array.addressable_data(0), _gather(mesh)(params))


@functools.cache
def _gather(mesh: Mesh) -> Callable[[Any], Any]:
    """One function for each mesh, or every call would compile it anew."""
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=replicated(mesh))
