"""The sizes of a Qwen3.5 text model, read from and written to a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

LINEAR_PER_BLOCK = 3  # a block is three linear-attention layers and one full-attention layer
LAYERS_PER_BLOCK = LINEAR_PER_BLOCK + 1  # Hugging Face: full_attention_interval
DTYPES = ("float32", "bfloat16")

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# Fields of the Hugging Face config for which this model knows one value only.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "full_attention_interval": LAYERS_PER_BLOCK,
    "mamba_ssm_dtype": "float32",
}
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ROPE |= {"mrope_section", "mrope_interleaved"}  # of three equal positions, which text has
# Fields that say nothing about the text model's function: bookkeeping, training from scratch,
# generation defaults, and the parts of a checkpoint that hf_io leaves alone.
_IGNORED = {
    *("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path"),
    *("dtype", "torch_dtype", "tie_word_embeddings", "layer_types", "rope_parameters"),
    *("rope_theta", "partial_rotary_factor", "rms_norm_eps"),
    *("max_position_embeddings", "initializer_range", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "id2label", "label2id", "problem_type", "mlp_only_layers"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
}


@dataclass(frozen=True)
class Qwen35Config:
    """Sizes of the text model; names are Hugging Face's. Hashable."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    tie_word_embeddings: bool = True
    dtype: str = "float32"  # of activations and the cache

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer.")
        _multiple(self, "num_hidden_layers", LAYERS_PER_BLOCK, "3 linear + 1 full layers a block")
        _multiple(self, "num_attention_heads", self.num_key_value_heads, "num_key_value_heads")
        _multiple(self, "linear_num_value_heads", self.linear_num_key_heads, "linear_num_key_heads")
        if self.linear_conv_kernel_dim < 2:
            raise ValueError("linear_conv_kernel_dim is 1; it must be at least 2.")
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"head_dim * partial_rotary_factor is {self.rotary_dim}; it must be even, at"
                f" least 2 and at most head_dim = {self.head_dim}: change partial_rotary_factor."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {DTYPES}.")

    @property
    def num_blocks(self) -> int:
        return self.num_hidden_layers // LAYERS_PER_BLOCK

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> list[str]:
        block = ["linear_attention"] * LINEAR_PER_BLOCK + ["full_attention"]
        return block * self.num_blocks

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen35Config:
        """From the contents of config.json, of the text model or of the multimodal wrapper."""
        text = dict(hf.get("text_config", hf))
        if "tie_word_embeddings" in hf:
            text.setdefault("tie_word_embeddings", hf["tie_word_embeddings"])
        kind = text.get("model_type", "qwen3_5_text")
        if kind != "qwen3_5_text":
            raise ValueError(f"model_type is {kind!r}; only 'qwen3_5_text' is known: convert it.")
        for name, needed in _FIXED.items():
            if text.get(name, needed) != needed:
                raise ValueError(
                    f"{name} is {text[name]!r}; this model supports {needed!r} only: use a"
                    f" checkpoint with {name} = {needed!r}."
                )
        rope = text.get("rope_parameters") or {n: x for n, x in text.items() if n in _ROPE}
        known = {*_COUNTS, *_FIXED, *_IGNORED}
        unknown = [n for n, x in text.items() if n not in known and x]
        unknown += [f"rope_parameters.{n}" for n, x in rope.items() if n not in _ROPE and x]
        if unknown:
            raise ValueError(
                f"config.json sets {', '.join(unknown)}, which this model does not support: use a"
                " checkpoint of plain Qwen3.5, or remove what does not change the text model."
            )
        missing = [name for name in (*_COUNTS, "tie_word_embeddings") if name not in text]
        missing += [] if "rope_theta" in rope else ["rope_parameters.rope_theta"]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}: add them.")
        if rope.get("rope_type", "default") != "default":
            raise ValueError(
                f"rope_type is {rope['rope_type']!r}; this model supports 'default' only: remove"
                " rope scaling from rope_parameters."
            )
        config = cls(
            **{name: text[name] for name in _COUNTS},
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope["rope_theta"]),
            partial_rotary_factor=float(
                rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
            ),
            tie_word_embeddings=bool(text["tie_word_embeddings"]),
            dtype=_dtype(text, hf),
        )
        if list(text.get("layer_types") or config.layer_types) != config.layer_types:
            raise ValueError(
                f"layer_types is {text['layer_types']!r}; every fourth layer, and no other, must be"
                " 'full_attention': use a checkpoint of that pattern."
            )
        return config

    def to_hf(self) -> dict[str, Any]:
        """What config.json of the text model holds; `from_hf` gives the same config back."""
        pairs = self.rotary_dim // 2
        # Interleaved mRoPE splits the pairs over time, height and width; for text the three
        # positions are equal, so any split is the same rotation (spec section 1).
        sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **{name: getattr(self, name) for name in _COUNTS},
            **_FIXED,
            "layer_types": self.layer_types,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                "mrope_section": sections,
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": self.tie_word_embeddings,
            "dtype": self.dtype,
        }


def _multiple(config: Qwen35Config, name: str, of: int, why: str) -> None:
    value = getattr(config, name)
    if value % of:
        raise ValueError(f"{name} is {value}; it must be a multiple of {of} ({why}).")


def _dtype(text: Mapping[str, Any], wrapper: Mapping[str, Any]) -> str:
    for source in (text, wrapper):
        for name in ("dtype", "torch_dtype"):
            if source.get(name):
                return str(source[name]).removeprefix("torch.")
    return "float32"


_PUBLISHED = Qwen35Config(
    vocab_size=248320,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
# The published sizes, for sizing without a checkpoint; a checkpoint's config.json always wins.
PRESETS = {
    "4b": replace(_PUBLISHED, hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True),
    "9b": _PUBLISHED,
    "tiny": Qwen35Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
    ),
}
