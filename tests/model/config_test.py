"""Sizes: the presets, and that a field which the model does not know is refused by its name."""

import dataclasses

import pytest

from harness_s_jax.model.config import PRESETS, Qwen35Config
from harness_s_jax.model.params import num_params

# As published: the text model's fields among those of its multimodal wrapper.
WRAPPER = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": True,
    "vision_config": {"depth": 27},
    "image_token_id": 248056,
    "text_config": PRESETS["4b"].to_hf()
    | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "eos_token_id": 248044},
}


@pytest.mark.parametrize(
    ("model", "count"), [("4b", 4_205_751_296), ("9b", 8_953_803_264), ("tiny", 260_192)]
)
def test_presets_have_the_published_number_of_parameters(model, count):
    assert num_params(PRESETS[model]) == count


def test_a_published_config_is_the_preset():
    assert Qwen35Config.from_hf(WRAPPER) == PRESETS["4b"]
    text = dict(WRAPPER["text_config"])
    del text["tie_word_embeddings"]
    assert Qwen35Config.from_hf(WRAPPER | {"text_config": text}) == PRESETS["4b"]


def test_the_checkpoint_wins_over_the_preset():
    text = WRAPPER["text_config"] | {"rope_parameters": {"rope_theta": 1e6}, "vocab_size": 1000}
    config = Qwen35Config.from_hf(WRAPPER | {"text_config": text})
    wanted = dataclasses.replace(PRESETS["4b"], rope_theta=1e6, vocab_size=1000)
    assert config == wanted


@pytest.mark.parametrize(
    ("field", "value"), [("num_experts", 64), ("sliding_window", 4096), ("logit_softcapping", 30.0)]
)
def test_an_unknown_field_is_refused_by_name_unless_it_is_off(field, value):
    text = WRAPPER["text_config"]
    with pytest.raises(ValueError, match=f"config.json sets {field}, which"):
        Qwen35Config.from_hf(WRAPPER | {"text_config": text | {field: value}})
    assert Qwen35Config.from_hf(WRAPPER | {"text_config": text | {field: None}}) == PRESETS["4b"]


def test_an_unknown_field_of_the_rotation_is_refused_too():
    rope = WRAPPER["text_config"]["rope_parameters"] | {"factor": 4.0}
    with pytest.raises(ValueError, match=r"rope_parameters\.factor"):
        Qwen35Config.from_hf(WRAPPER["text_config"] | {"rope_parameters": rope})
