"""The two backends of full attention compute the same, and no long row makes a [T, T]."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from harness_s_jax.model import attention

pytestmark = pytest.mark.stack


def inputs(t, h, n, c):
    key = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, t, h, c), (2, t, n, c), (2, t, n, c))
    q, k, v = (jax.random.normal(k, s) for k, s in zip(key, shapes, strict=True))
    segment = np.stack([np.repeat([0, 1, -1], [t // 4, t // 2, t // 4]), np.zeros(t, int)])
    return q, k, v, jnp.asarray(segment, jnp.int32)


def test_the_splash_kernel_equals_the_plain_form():
    """Interpreted on the CPU, with segments, grouped queries and a head of 128."""
    args = inputs(256, 4, 2, 128)
    plain = attention._xla_attend(*args)
    splash = attention._splash_attend(*args, None, interpret=True)
    np.testing.assert_allclose(splash, plain, atol=2e-5)


def test_the_kernel_is_taken_on_a_tpu_where_its_tiles_fit():
    class Device:
        platform = "tpu"

    mesh = Mesh(np.array([[Device()]]), ("fsdp", "tensor"))
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_splash_attend", lambda *a: taken.append("splash"))
        patch.setattr(attention, "_xla_attend", lambda *a: taken.append("xla"))
        for t, c, where in ((256, 128, mesh), (200, 128, mesh), (256, 64, mesh), (256, 128, None)):
            attention.packed_attend(*inputs(t, 4, 2, c), where)
    assert taken == ["splash", "xla", "xla", "xla"]


def test_no_square_of_a_long_row_exists():
    t = 4 * attention.QUERIES
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(t, 2, 1, 8)]

    def program(attend):
        loss = lambda q, k, v, segment: attend(q, k, v, segment).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile().as_text()

    square = re.compile(rf"\[(?:\d+,)*{t},(?:\d+,)*{t}\]")
    assert not square.search(program(attention._xla_attend))
    whole = functools.partial(jax.jit, static_argnums=())(
        lambda q, k, v, segment: attention.attend(q, k, v, segment[:, :, None] == segment[:, None])
    )
    assert square.search(program(whole))  # the check can fail
