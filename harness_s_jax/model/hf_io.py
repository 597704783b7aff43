"""Reads and writes Qwen3.5 text checkpoints in Hugging Face's names and layouts.

Here matrices are [in, out] and the layers are stacked; there each layer's tensors stand alone, are
[out, in], and hold q, k and v of the linear layers (also their conv kernels) as one array.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from harness_s_jax.model.config import LAYERS_PER_BLOCK, LINEAR_PER_BLOCK, Qwen35Config
from harness_s_jax.model.params import Params, param_shapes

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SKIPPED = ("model.visual.", "mtp.")  # parts of a published checkpoint that are not the text model
FLOAT32 = ("A_log_H", "norm_out_C")  # stored in float32 whatever the dtype

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


class _Entry(NamedTuple):
    """One tensor of the file, and where its parts lie in our tree."""

    theirs: str
    group: str | None  # "linear" or "full" in params["blocks"]; None at the top
    index: tuple[int, ...]  # into the stacked layers
    names: tuple[str, ...]


def load(directory: str | os.PathLike[str]) -> tuple[Qwen35Config, Params]:
    """The config and the parameters (numpy, in the file's dtypes) of a checkpoint directory."""
    directory = pathlib.Path(directory)
    config = Qwen35Config.from_hf(json.loads((directory / CONFIG).read_text()))
    shapes = param_shapes(config)
    params: Params = {"blocks": {"linear": {}, "full": {}}}
    with _Files(directory) as files:
        for entry in _entries(config):
            value = files.take(entry.theirs)
            parts = _place(shapes, entry)
            ours = [parts[name][len(entry.index) :] for name in entry.names]
            needed = _joined(
                [_to_hf(n, np.empty(s, bool)) for n, s in zip(entry.names, ours, strict=True)]
            )
            _check(entry.theirs, value, needed.shape)
            target, ends = _place(params, entry), np.cumsum([s[-1] for s in ours])[:-1]
            split = np.split(value, ends) if len(ours) > 1 else [value]
            for name, part in zip(entry.names, split, strict=True):
                if name not in target:
                    target[name] = np.empty(parts[name], value.dtype)
                if target[name].dtype != value.dtype:
                    raise ValueError(
                        f"tensor {entry.theirs} is {value.dtype} but that of an earlier layer is"
                        f" {target[name].dtype}: store both alike."
                    )
                target[name][entry.index] = _from_hf(name, part)
        if files.left():
            raise ValueError(
                f"{directory} holds tensor {files.left()[0]}, which this model has no place for:"
                " remove it or correct config.json."
            )
    return config, params


def save(directory: str | os.PathLike[str], config: Qwen35Config, params: Params) -> None:
    """Write model.safetensors and config.json, each aside and then renamed into place.

    Tensors are stored in config.dtype, A_log and the gated norm in float32.
    """
    directory = pathlib.Path(directory)
    if (directory / INDEX).exists():
        raise ValueError(f"{directory} holds a sharded checkpoint ({INDEX}): save elsewhere.")
    shapes, tensors = param_shapes(config), {}
    _same_tree(shapes, params)
    for entry in _entries(config):
        source, values = _place(params, entry), []
        for name in entry.names:
            if source[name].shape != _place(shapes, entry)[name]:
                raise ValueError(
                    f"parameter {name} has shape {source[name].shape}; the config needs"
                    f" {_place(shapes, entry)[name]}: save the config it was made with."
                )
            dtype = np.float32 if name in FLOAT32 else _numpy_dtype(config.dtype)
            values.append(_to_hf(name, np.asarray(source[name][entry.index]).astype(dtype)))
        value = np.ascontiguousarray(_joined(values))
        _check(entry.theirs, value, value.shape)
        tensors[entry.theirs] = value
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{WEIGHTS}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(directory / WEIGHTS)
    part = directory / f"{CONFIG}.part"
    part.write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    part.replace(directory / CONFIG)


def _entries(config: Qwen35Config) -> Iterator[_Entry]:
    yield _Entry("model.embed_tokens.weight", None, (), ("embed_VD",))
    yield _Entry("model.norm.weight", None, (), ("norm_D",))
    if not config.tie_word_embeddings:
        yield _Entry("lm_head.weight", None, (), ("head_DV",))
    for layer in range(config.num_hidden_layers):
        block, j = divmod(layer, LAYERS_PER_BLOCK)
        linear = j < LINEAR_PER_BLOCK
        group, index = ("linear", (block, j)) if linear else ("full", (block,))
        for theirs, names in (_LINEAR if linear else _FULL).items():
            yield _Entry(f"model.layers.{layer}.{theirs}", group, index, names)


def _place(tree: Mapping[str, Any], entry: _Entry) -> dict[str, Any]:
    return tree["blocks"][entry.group] if entry.group else tree


def _to_hf(name: str, x: np.ndarray) -> np.ndarray:
    if x.ndim == 1 or name == "embed_VD":
        return x
    return x.T[:, None] if name.endswith("_WP") else x.T  # conv kernels: [channels, 1, taps]


def _from_hf(name: str, x: np.ndarray) -> np.ndarray:
    if x.ndim == 1 or name == "embed_VD":
        return x
    return x[:, 0].T if name.endswith("_WP") else x.T


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _check(name: str, value: np.ndarray, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"tensor {name} has shape {value.shape}; config.json needs {shape}.")
    if not np.isfinite(value).all():
        raise ValueError(f"tensor {name} holds NaN or infinity: use an earlier checkpoint.")


def _same_tree(shapes: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    needed, got = (
        {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, leaf)}
        for tree, leaf in ((shapes, lambda x: isinstance(x, tuple)), (params, None))
    )
    if needed != got:
        raise ValueError(
            f"params lack {sorted(needed - got)} and have {sorted(got - needed)} too many: save the"
            " config they were made with."
        )


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class _Files:
    """The safetensors files of a directory, read one tensor at a time under our prefix."""

    def __init__(self, directory: pathlib.Path):
        index = directory / INDEX
        names = {WEIGHTS}
        if index.exists():
            names = set(json.loads(index.read_text())["weight_map"].values())
        self._directory = directory
        self._files = [safe_open(directory / name, framework="numpy") for name in sorted(names)]
        self._where = {}
        for file in self._files:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if not name.startswith(SKIPPED):
                    ours = name.replace("model.language_model.", "model.", 1)
                    self._where[ours] = (file, name)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.__exit__(*exception)

    def take(self, name: str) -> np.ndarray:
        if name not in self._where:
            raise ValueError(
                f"{self._directory} lacks tensor {name}: the checkpoint is incomplete."
            )
        file, stored = self._where.pop(name)
        return file.get_tensor(stored)

    def left(self) -> list[str]:
        return sorted(stored for _, stored in self._where.values())
