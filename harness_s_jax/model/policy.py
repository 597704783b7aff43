"""A stored policy: config.json, model.safetensors and tokenizer.model in one directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_s_jax.model import hf_io
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.safetensors_file import written_aside
from harness_s_jax.model.template import ChatTemplate, embedded_template
from harness_s_jax.model.tokenizer import SentencePieceTokenizer

TOKENIZER_FILE = "tokenizer.model"
SHIPPED = Path(__file__).parents[1] / "assets" / "miniworld_policy"  # the warm-started debug policy


@dataclass(frozen=True)
class StoredPolicy:
    """Sizes, parameters (numpy arrays in the model's layout) and the chat template."""

    config: Qwen35Config
    params: Any
    template: ChatTemplate


def policy_directory(workdir: Path, checkpoint: str) -> Path:
    """Where a run's policy is: its own if it made one, else `checkpoint`, else the shipped one."""
    own = workdir / "policy"
    if own.exists():
        return own
    return Path(checkpoint) if checkpoint else SHIPPED


def load_policy(directory: Path) -> StoredPolicy:
    """Raises ValueError or OSError with a sentence that names what is missing or wrong."""
    config, params = hf_io.load(directory)
    template = embedded_template(SentencePieceTokenizer.from_file(directory / TOKENIZER_FILE))
    return StoredPolicy(config, params, template)


def save_policy(
    directory: Path, config: Qwen35Config, params: Any, tokenizer: SentencePieceTokenizer
) -> None:
    """Writes what `load_policy` reads, all of it or nothing (see `written_aside`)."""
    with written_aside(directory) as part:
        (part / TOKENIZER_FILE).write_bytes(tokenizer.model)
        hf_io.write(part, config, params)
