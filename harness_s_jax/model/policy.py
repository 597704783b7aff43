"""A stored policy: a checkpoint of the model and its tokenizer in one directory.

With a tokenizer.model (SentencePiece) it is an embedded policy, else a published Qwen3.5.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from harness_s_jax.model import hf_io, shard
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.safetensors_file import written_aside
from harness_s_jax.model.template import (
    ChatTemplate,
    KeepThinking,
    embedded_template,
    qwen3_5_template,
)
from harness_s_jax.model.tokenizer import HfTokenizer, SentencePieceTokenizer

TOKENIZER_FILE = "tokenizer.model"
SHIPPED = Path(__file__).parents[1] / "assets" / "miniworld_policy"  # the warm-started debug policy


@dataclass(frozen=True)
class StoredPolicy:
    """Sizes, float32 parameters in the model's layout, and the chat template."""

    config: Qwen35Config
    params: Any
    template: ChatTemplate


def policy_directory(workdir: Path, checkpoint: str) -> Path:
    """Where a run's policy is: its own if it made one, else `checkpoint`, else the shipped one."""
    own = workdir / "policy"
    if own.exists():
        return own
    return Path(checkpoint) if checkpoint else SHIPPED


def load_policy(
    directory: Path, keep_thinking: KeepThinking = "all", mesh: Mesh | None = None
) -> StoredPolicy:
    """A policy whose parameters are the learner's masters: float32 whatever the file's dtype.

    With a mesh they are sharded over it, and no host ever holds them all; without one they are
    numpy arrays. The sampler gets a copy of them in config.dtype (`shard.local_copy`).

    Raises ValueError or OSError with a sentence that names what is missing or wrong.
    """
    template = load_template(directory, keep_thinking)
    place = functools.partial(shard.sharding_of, mesh) if mesh is not None else None
    return StoredPolicy(*hf_io.load(directory, place, dtype="float32"), template)


def load_template(directory: Path, keep_thinking: KeepThinking) -> ChatTemplate:
    """The policy's tokenizer in its chat template; an embedded policy does not think."""
    if (directory / TOKENIZER_FILE).exists():
        return embedded_template(SentencePieceTokenizer.from_file(directory / TOKENIZER_FILE))
    tokenizer = HfTokenizer.from_checkpoint(directory)
    return qwen3_5_template(tokenizer, thinking=True, keep_thinking=keep_thinking)


def save_policy(
    directory: Path, config: Qwen35Config, params: Any, tokenizer: SentencePieceTokenizer
) -> None:
    """Writes an embedded policy, all of it or nothing (see `written_aside`).

    One that was trained from another is saved by hf_io.save with that one as its source.
    """
    with written_aside(directory) as part:
        (part / TOKENIZER_FILE).write_bytes(tokenizer.model)
        hf_io.write(part, config, params)
