"""What the gradient keeps and what it makes again, and a scan over blocks that adds it in place.

With jax.checkpoint in lax.scan the gradients of all blocks are new arrays, which the caller then
adds to those of the micro-batches before: twice the gradient in memory (8 GiB of a chip's for the
9B on four). Here they are added, block by block, into the arrays that hold the sum so far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

# What the gradient remakes: nothing; each block from its input; each part of a block (mixer or MLP)
# from its input; or both nested, which keeps blocks' inputs and, of one block, those of its parts.
Remat = Literal["none", "block", "layer", "nested"]
Part = Callable[[jax.Array, Any], jax.Array]

# For a function whose result is cheap to make again and large to keep: the gradient starts from its
# inputs. Forward and backward pass are different loops, so that no barrier is needed between them.
remade = functools.partial(jax.checkpoint, prevent_cse=False)


def scan_blocks(
    parts: Sequence[Part], x: jax.Array, blocks: Any, remat: Remat, sums: Any | None
) -> jax.Array:
    """Runs x through the parts of one block after another.

    parts: (x, the arrays of one block) -> x; what they close over has no gradient.
    blocks: a tree of arrays stacked on their first axis.
    sums: a tree like `blocks`, or None. The gradient that is handed back for `blocks` is `sums`
        plus the true one; where `sums` is donated, in its memory (with remat "none": not).
    """
    sums = jax.tree.map(jnp.zeros_like, blocks) if sums is None else sums
    if remat == "none":
        return jax.lax.scan(lambda x, p: (_chain(parts, x, p), None), x, _plus(blocks, sums))[0]
    if remat == "nested":
        parts = [jax.checkpoint(part) for part in parts]
    if remat != "layer":
        parts = [functools.partial(_chain, parts)]

    @jax.custom_vjp
    def run(x, blocks, sums):
        return forward(x, blocks, sums)[0]

    def forward(x, blocks, sums):
        def step(x, p):
            inputs = []
            for part in parts:
                inputs.append(x)
                x = part(x, p)
            return x, inputs

        x, inputs = jax.lax.scan(step, x, blocks)
        return x, (inputs, blocks, sums)

    def backward(saved, dx):
        inputs, blocks, sums = saved
        count = inputs[0].shape[0]

        def pull(done, carry):
            dx, sums = carry
            i = count - 1 - done
            p = jax.tree.map(lambda a: a[i], blocks)
            for part, x in zip(reversed(parts), reversed(inputs), strict=True):
                # Else a compiler may remake all parts before it needs the first.
                x, dx = jax.lax.optimization_barrier((x[i], dx))
                dx, dp = jax.vjp(part, x, p)[1](dx)
                sums = jax.tree.map(lambda s, d: s.at[i].add(d), sums, dp)
            return dx, sums

        dx, sums = jax.lax.fori_loop(0, count, pull, (dx, sums))
        return dx, sums, jax.tree.map(jnp.zeros_like, sums)

    run.defvjp(forward, backward)
    return run(x, blocks, sums)


def _chain(parts: Sequence[Part], x: jax.Array, p: Any) -> jax.Array:
    for part in parts:
        x = part(x, p)
    return x


@jax.custom_vjp
def _plus(tree: Any, sums: Any) -> Any:
    """`tree`, whose gradient comes added to `sums`."""
    return tree


_plus.defvjp(
    lambda tree, sums: (tree, sums),
    lambda sums, grads: (
        jax.tree.map(jnp.add, sums, grads),
        jax.tree.map(jnp.zeros_like, sums),
    ),
)
