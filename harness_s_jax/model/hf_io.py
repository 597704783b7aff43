"""Reads and writes Qwen3.5 text checkpoints in Hugging Face's names and layouts, as a stream.

Here matrices are [in, out] and the layers are stacked; there each layer's tensors stand alone, are
[out, in], and hold q, k and v of the linear layers (also their conv kernels) as one array. Both
ways a block of a few megabytes is on the host at a time, apart from the array that is being filled.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from harness_s_jax.model import safetensors_file as files
from harness_s_jax.model.config import LAYERS_PER_BLOCK, LINEAR_PER_BLOCK, Qwen35Config
from harness_s_jax.model.params import Params, abstract_params, param_shapes

# What stands before the text model's names in a file, by the class of transformers that saved it.
# "language_model.model.", which no class writes but MLX's converter does, is not among them: its
# norms and conv kernels are stored differently.
PREFIXES = {
    "model.language_model.": "Qwen3_5ForConditionalGeneration",
    "model.": "Qwen3_5ForCausalLM",
    "language_model.": "Qwen3_5Model",
    "": "Qwen3_5TextModel",
}
SKIPPED = ("model.visual.", "visual.", "mtp.")  # parts that are not the text model
HEAD = "lm_head.weight"
FLOAT32 = ("A_log_H", "norm_out_C")  # stored in float32 whatever the dtype
MAX_SHARD_BYTES = 5_000_000_000

Place = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

# Theirs, within a layer -> ours; several of ours are joined on their first axis.
_SHARED = {
    "input_layernorm.weight": ("norm_in_D",),
    "post_attention_layernorm.weight": ("norm_mlp_D",),
    "mlp.gate_proj.weight": ("gate_DF",),
    "mlp.up_proj.weight": ("up_DF",),
    "mlp.down_proj.weight": ("down_FD",),
}
_LINEAR = _SHARED | {
    "linear_attn.in_proj_qkv.weight": ("q_DP", "k_DP", "v_DP"),
    "linear_attn.conv1d.weight": ("conv_q_WP", "conv_k_WP", "conv_v_WP"),
    "linear_attn.in_proj_z.weight": ("z_DP",),
    "linear_attn.in_proj_b.weight": ("b_DH",),
    "linear_attn.in_proj_a.weight": ("a_DH",),
    "linear_attn.A_log": ("A_log_H",),
    "linear_attn.dt_bias": ("dt_bias_H",),
    "linear_attn.norm.weight": ("norm_out_C",),
    "linear_attn.out_proj.weight": ("out_PD",),
}
_FULL = _SHARED | {
    "self_attn.q_proj.weight": ("q_DP",),
    "self_attn.k_proj.weight": ("k_DP",),
    "self_attn.v_proj.weight": ("v_DP",),
    "self_attn.q_norm.weight": ("norm_q_C",),
    "self_attn.k_norm.weight": ("norm_k_C",),
    "self_attn.o_proj.weight": ("out_PD",),
}


class _Part(NamedTuple):
    """One of our arrays, or one layer of it, and the rows of a tensor of the file that it is."""

    name: str
    group: str | None  # "linear" or "full" in params["blocks"]; None at the top
    stack: tuple[int, ...]  # its index in the stacked layers
    shape: tuple[int, ...]  # without them
    start: int  # the first row there

    @property
    def rows(self) -> int:
        """Which of our axes is their rows."""
        return 0 if len(self.shape) == 1 or self.name == "embed_VD" else 1

    def to_hf(self, axes: tuple[Any, ...], one: Any) -> tuple[Any, ...]:
        """What belongs to our axes, in the order of theirs; `one` to the 1 in conv's [P, 1, W]."""
        if not self.rows:
            return axes
        return (axes[1], one, axes[0]) if self.name.endswith("_WP") else (axes[1], axes[0])

    def blocks(self, within: tuple[slice, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
        """That block of ours, cut into whole rows of theirs of about files.BLOCK_BYTES in all."""
        low, high = within[self.rows].start, within[self.rows].stop
        size = math.prod(s.stop - s.start for s in within) * itemsize // (high - low)
        step = max(1, files.BLOCK_BYTES // size)
        for at in range(low, high, step):
            rows = slice(at, min(at + step, high))
            yield (within[0], rows) if self.rows else (rows, *within[1:])


class _Entry(NamedTuple):
    """One tensor of the file, and which parts of ours it joins on its first axis."""

    theirs: str
    parts: list[_Part]

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [part.to_hf(part.shape, 1) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


class _Source(NamedTuple):
    """Where a part of ours is stored, and the copy, if any, that must equal it."""

    part: _Part
    stored: files.Stored
    twin: files.Stored | None


def load(
    directory: str | os.PathLike[str], place: Place | None = None, *, dtype: str | None = None
) -> tuple[Qwen35Config, Params]:
    """The config and the parameters of a checkpoint directory.

    With `place`, which gives the sharding for our name and (stacked) shape, they are jax arrays of
    which each process reads what its own devices hold; without it numpy arrays. They have the
    file's dtypes, or `dtype`, save for A_log and the gated norm: stored in float32 they stay so.

    Raises:
      FileNotFoundError: config.json, the weights or a file of theirs is missing.
      ValueError: config.json is unsupported, a file is damaged, or a tensor is missing, without a
        place, of a wrong shape or dtype, or holds NaN or infinity; the sentence names it.
    """
    directory = pathlib.Path(directory)
    config = Qwen35Config.from_hf(files.read_json(directory / files.CONFIG))
    stored = files.catalog(directory)
    wanted = list(entries(config, _prefix(directory, stored)))
    _check_stored(directory, stored, {entry.theirs: entry.shape for entry in wanted}, config)
    tied_copy = stored.get(HEAD) if config.tie_word_embeddings else None
    sources: dict[tuple[str | None, str], list[_Source]] = {}
    for entry in wanted:
        for part in entry.parts:
            layers = sources.setdefault((part.group, part.name), [])
            twin = tied_copy if part.name == "embed_VD" else None
            layers.append(_Source(part, stored[entry.theirs], twin))
    params, shapes = {"blocks": {"linear": {}, "full": {}}}, param_shapes(config)
    for (group, name), layers in sources.items():
        _of(params, group)[name] = _array(_of(shapes, group)[name], layers, place, dtype)
    return config, params


def _prefix(directory: pathlib.Path, stored: Mapping[str, files.Stored]) -> str:
    """The prefix of the text model's names."""
    found: dict[str, str] = {}
    for name in stored:
        match = re.fullmatch(r"(.*?)(embed_tokens|norm|layers\.\d+)\.\w.*", name)
        if match and match[1] in PREFIXES:
            found.setdefault(match[1], name)
    if not found:
        raise ValueError(
            f"{directory} holds {min(stored, default='nothing')}, but no text model under any of"
            f" the prefixes {list(PREFIXES)}: convert it with transformers."
        )
    if len(found) > 1:
        both = " and ".join(found.values())
        raise ValueError(f"{directory} holds {both}, two text models: remove one.")
    return next(iter(found))


def _check_stored(
    directory: pathlib.Path,
    stored: Mapping[str, files.Stored],
    needed: dict[str, tuple[int, ...]],
    config: Qwen35Config,
) -> None:
    """Compare the headers with the names and shapes that the model needs."""
    embedding = next(iter(needed))
    if config.tie_word_embeddings and HEAD in stored:
        needed = needed | {HEAD: needed[embedding]}
        if stored[HEAD].dtype != stored[embedding].dtype:
            raise _untied()
    for name, shape in needed.items():
        if name not in stored:
            raise ValueError(f"{directory} lacks tensor {name}: the checkpoint is incomplete.")
        if stored[name].shape != shape:
            raise ValueError(
                f"tensor {name} has shape {stored[name].shape}; config.json needs {shape}."
            )
        if stored[name].dtype not in files.FLOATS:
            raise ValueError(
                f"tensor {name} is {stored[name].dtype}; it must be one of {list(files.FLOATS)}:"
                " convert it, or use the checkpoint that was not quantized."
            )
    extra = [n for n in stored if n not in needed and not n.startswith(SKIPPED)]
    if extra:
        raise ValueError(
            f"{directory} holds tensor {min(extra)}, which this model has no place for: remove it"
            " or correct config.json."
        )


def _untied() -> ValueError:
    return ValueError(
        f"tensor {HEAD} differs from the embedding, but config.json has tie_word_embeddings ="
        " true: set it to false, or remove the tensor."
    )


def _array(
    shape: tuple[int, ...], layers: list[_Source], place: Place | None, dtype: str | None
) -> Any:
    """One of our arrays, from its layers."""
    name, first = layers[0].part.name, layers[0].stored
    for _, stored, _ in layers:
        if stored.dtype != first.dtype:
            raise ValueError(
                f"tensor {stored.name} is {stored.dtype} but that of an earlier layer is"
                f" {first.dtype}: store both alike."
            )
    if dtype is None or (name in FLOAT32 and first.dtype == "F32"):
        kind = files.FLOATS[first.dtype]
    else:
        kind = files.FLOATS[files.dtype_name(dtype)]
    read = functools.cache(functools.partial(_read, kind, layers))  # replicas: read once

    def block(index: Any) -> np.ndarray:
        return read(*(s.indices(size)[:2] for s, size in zip(index, shape, strict=True)))

    if place is None:
        return block((slice(None),) * len(shape))
    array = jax.make_array_from_callback(shape, place(name, shape), block, dtype=kind)
    return jax.block_until_ready(array)  # or the host would hold those still under way


def _read(dtype: np.dtype, layers: list[_Source], *ends: tuple[int, int]) -> np.ndarray:
    """The block between these ends of one of our arrays."""
    bounds = [slice(*pair) for pair in ends]
    out = np.empty([b.stop - b.start for b in bounds], dtype)
    for part, stored, twin in layers:
        stack, own = bounds[: len(part.stack)], tuple(bounds[len(part.stack) :])
        if not all(b.start <= i < b.stop for i, b in zip(part.stack, stack, strict=True)):
            continue
        layer = out[tuple(i - b.start for i, b in zip(part.stack, stack, strict=True))]
        for block in part.blocks(own, dtype.itemsize):
            rows, *others = part.to_hf(block, slice(None))
            theirs = (_moved(rows, part.start), *others)
            value = files.read(stored, theirs)
            if twin and value.tobytes() != files.read(twin, theirs).tobytes():
                raise _untied()
            target = layer[tuple(_moved(s, -b.start) for s, b in zip(block, own, strict=True))]
            target[...] = value.reshape(target.shape[::-1]).T if part.rows else value
            _check_finite(stored.name, target)
    return out


def save(
    directory: str | os.PathLike[str],
    config: Qwen35Config,
    params: Params,
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint that transformers loads, in place of an earlier one or of nothing.

    See `write` for what is written and `written_aside` for what becomes of the directory.
    """
    with files.written_aside(directory) as part:
        write(part, config, params, source=source, max_shard_bytes=max_shard_bytes)


def write(
    directory: pathlib.Path,
    config: Qwen35Config,
    params: Params,
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """What `save` does, into an existing directory; use it inside `written_aside`.

    Tensors are stored in config.dtype, A_log and the gated norm in float32. With `source`, the
    checkpoint that the model came from, its names, its vision and MTP tensors, its tokenizer and
    other companions, and its config.json but for what changed, are kept.

    Raises:
      ValueError: `params` do not belong to `config`, are spread over processes, or hold NaN or
        infinity; or `source` cannot be read.
    """
    _check_params(config, params)
    prefix, untouched, hf = "model.", [], config.to_hf()
    if source is not None:
        source = pathlib.Path(source)
        stored = files.catalog(source)
        prefix, hf = _prefix(source, stored), _changed_config(source, config)
        untouched = [files.copied(s) for n, s in stored.items() if n.startswith(SKIPPED)]
        files.copy_companions(source, directory)
    (directory / files.CONFIG).write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    tensors = []
    for entry in entries(config, prefix):
        dtype = files.dtype_name("float32" if entry.parts[0].name in FLOAT32 else config.dtype)
        size = math.prod(entry.shape) * files.FLOATS[dtype].itemsize
        blocks = functools.partial(_blocks, entry, params, files.FLOATS[dtype])
        tensors.append(files.Tensor(entry.theirs, dtype, entry.shape, size, blocks))
    files.write(directory, [*tensors, *untouched], max_shard_bytes)


def _changed_config(source: pathlib.Path, config: Qwen35Config) -> dict[str, Any]:
    """The contents of the source's config.json, in which only what differs is replaced."""
    hf = files.read_json(source / files.CONFIG)
    text = hf.get("text_config", hf)
    old, new = Qwen35Config.from_hf(hf).to_hf(), config.to_hf()
    for name in (n for n in new if new[n] != old[n]):
        if isinstance(new[name], dict):
            changed = {n: x for n, x in new[name].items() if x != old[name][n]}
            text[name] = {**text.get(name, {}), **changed}
        else:
            text[name] = new[name]
            # The wrapper repeats some; what transformers once called torch_dtype is dtype.
            hf |= {name: new[name]} if name in hf else {}
    if "dtype" in text:
        text.pop("torch_dtype", None)
    if Qwen35Config.from_hf(hf) != config:
        raise ValueError(
            f"{source / files.CONFIG} cannot be made to say {config}: save without source."
        )
    return hf


def _blocks(entry: _Entry, params: Params, dtype: np.dtype) -> Iterator[memoryview]:
    """The bytes of a tensor, in their layout."""
    for part in entry.parts:
        array = _of(params, part.group)[part.name]
        stack = tuple(slice(i, i + 1) for i in part.stack)
        whole = tuple(slice(0, size) for size in part.shape)
        for block in part.blocks(whole, dtype.itemsize):
            value = files.on_host(array, (*stack, *block))[(0,) * len(stack)]
            value = (value.T if part.rows else value).astype(dtype, order="C")
            _check_finite(entry.theirs, value)
            yield value.reshape(-1).view(np.uint8).data


def _check_params(config: Qwen35Config, params: Params) -> None:
    needed, got = (
        {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (abstract_params(config), params)
    )
    if needed.keys() != got.keys():
        raise ValueError(
            f"params lack {sorted(needed.keys() - got)} and have {sorted(got.keys() - needed)} too"
            " many: save the config they were made with."
        )
    for name, shape in ((name, x.shape) for name, x in needed.items()):
        if got[name].shape != shape:
            raise ValueError(
                f"parameter {name} has shape {got[name].shape}; {config} needs {shape}."
            )
        if isinstance(got[name], jax.Array) and not got[name].is_fully_addressable:
            raise ValueError(f"parameter {name} is spread over processes: gather it to one first.")


def entries(config: Qwen35Config, prefix: str) -> Iterator[_Entry]:
    """Every tensor of the file, the embedding first; the head never has a prefix."""
    shapes = param_shapes(config)

    def entry(
        theirs: str, names: tuple[str, ...], group: str | None = None, index: tuple[int, ...] = ()
    ) -> _Entry:
        parts, start = [], 0
        for name in names:
            shape = _of(shapes, group)[name][len(index) :]
            parts.append(_Part(name, group, index, shape, start))
            start += shape[parts[-1].rows]
        return _Entry(theirs, parts)

    yield entry(prefix + "embed_tokens.weight", ("embed_VD",))
    yield entry(prefix + "norm.weight", ("norm_D",))
    if not config.tie_word_embeddings:
        yield entry(HEAD, ("head_DV",))
    for layer in range(config.num_hidden_layers):
        block, j = divmod(layer, LAYERS_PER_BLOCK)
        linear = j < LINEAR_PER_BLOCK
        group, index = ("linear", (block, j)) if linear else ("full", (block,))
        for theirs, names in (_LINEAR if linear else _FULL).items():
            yield entry(f"{prefix}layers.{layer}.{theirs}", names, group, index)


def _of(tree: Mapping[str, Any], group: str | None) -> Any:
    return tree["blocks"][group] if group else tree


def _moved(s: slice, by: int) -> slice:
    return slice(s.start + by, s.stop + by)


def _check_finite(name: str, block: np.ndarray) -> None:
    if not np.isfinite(block).all():
        raise ValueError(f"tensor {name} holds NaN or infinity: use an earlier checkpoint.")
