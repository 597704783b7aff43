"""Which mesh axis each dimension lives on: one table, by the letters in an array's name.

Weights, optimizer state, activations, cache and logits all take their place from it. The axes are
fsdp (rows of the batch and, for weights, slices that are gathered block by block) and tensor
(heads, channels, vocabulary; between the layers it shards the tokens of a row instead, so that
what is saved for the gradient is shared out too).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Letter -> mesh axes. An array uses an axis once: where two of its letters want the same, the one
# that stands first here has it. So q_BTHC is split by heads, but x_BTD, between layers, by tokens.
AXES_OF = {
    "U": ("fsdp", "tensor"),  # the vocabulary where the learner makes logits of all rows
    "B": ("fsdp",),  # rows of a batch
    "S": ("fsdp",),  # slots of the sampler
    "V": ("tensor",),
    "P": ("tensor",),  # channels of a projection, head by head
    "F": ("tensor",),
    "H": ("tensor",),
    "N": ("tensor",),
    "T": ("tensor",),
    "D": ("fsdp",),
}


def make_mesh(tensor: int = 1, devices: Any = None) -> Mesh:
    """The devices (all of all processes by default) as (fsdp, tensor).

    Raises:
      ValueError: the devices do not divide by `tensor`.
    """
    if devices is None:  # a process's own side by side, so that a tensor axis stays on its host
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    devices = np.array(devices)
    if devices.size % tensor:
        raise ValueError(
            f"got {devices.size} devices for a tensor axis of {tensor}; it must divide"
        )
    return Mesh(devices.reshape(-1, tensor), ("fsdp", "tensor"))


def letters_of(name: str) -> str:
    """The letters of a name's suffix: "DF" of "gate_DF"; "" where there is none."""
    return name.rpartition("_")[2] if "_" in name else ""


def is_matrix(name: str) -> bool:
    """Whether a parameter has two axes of its own, so that it is sharded and computed with in the
    model's dtype; vectors (norms, gates a head) are whole on every device and float32."""
    return len(letters_of(name)) >= 2


def spec_of(mesh: Any, letters: str, shape: tuple[int, ...], *, without: str = "") -> PartitionSpec:
    """The place of the last len(letters) dimensions; those in front of them are whole.

    A dimension that its axis does not divide is whole too, as are those of the axis `without`.
    """
    sizes = dict(zip(letters, shape[len(shape) - len(letters) :], strict=True))
    places: dict[str, tuple[str, ...]] = {}
    free = {*mesh.axis_names} - {without}
    for letter, axes in AXES_OF.items():
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if letter in sizes and free.issuperset(axes) and sizes[letter] % parts == 0:
            places[letter] = axes
            free -= {*axes}
    front = [None] * (len(shape) - len(letters))
    return PartitionSpec(*front, *(_entry(places.get(letter)) for letter in letters))


def _entry(axes: tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    return axes[0] if axes is not None and len(axes) == 1 else axes


def sharding_of(mesh: Any, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Where an array of this name lives; one without two letters is whole on every device."""
    letters = letters_of(name) if is_matrix(name) else ""
    return NamedSharding(mesh, spec_of(mesh, letters, shape))


def shardings(mesh: Mesh, tree: Any) -> Any:
    """The shardings of a tree whose leaves are named by their last dictionary key: the parameters,
    or an optimizer's state of them. Other leaves are whole."""

    def of(path: Any, leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return sharding_of(mesh, names[-1] if names else "", np.shape(leaf))

    return jax.tree_util.tree_map_with_path(of, tree)


def constrain(mesh: Mesh | None, letters: str, x: jax.Array) -> jax.Array:
    """An activation in its place, inside a jitted function; as it is without a mesh."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec_of(mesh, letters, x.shape)))


def gathered(mesh: Mesh | None, name: str, weight: jax.Array, dtype: Any) -> jax.Array:
    """A weight as a layer uses it: cast, then gathered over fsdp, so that half the bytes travel.

    Called inside the scan over blocks it keeps at most a block's weights whole. A vector comes back
    as it is.
    """
    if not is_matrix(name):
        return weight
    weight = weight.astype(dtype)
    if mesh is None or mesh.size == 1:
        return weight
    spec = spec_of(mesh, letters_of(name), weight.shape, without="fsdp")
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, spec))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def local_copy(mesh: Mesh, params: Any, dtype: Any) -> Any:
    """A copy of sharded parameters on one of this process's devices, matrices in `dtype`.

    The sampler then computes with exactly the values that the learner's forward computes with. One
    program over all processes, which all must enter, gathers them (contract 9a of the design); the
    copy outlives a donation of the originals.
    """
    copied = _gather(mesh, np.dtype(dtype))(params)
    return jax.tree.map(lambda array: array.addressable_data(0), copied)


@functools.cache
def _gather(mesh: Mesh, dtype: Any) -> Callable[[Any], Any]:
    """One function for each mesh, or every call would compile it anew."""
    return jax.jit(functools.partial(computed, dtype=dtype), out_shardings=replicated(mesh))


def computed(params: Any, dtype: Any) -> Any:
    """A copy of parameters as a forward pass computes with them: matrices in `dtype`."""

    def copy(path: Any, x: jax.Array) -> jax.Array:
        return jnp.astype(x, dtype if is_matrix(path[-1].key) else x.dtype, copy=True)

    return jax.tree_util.tree_map_with_path(copy, params)
