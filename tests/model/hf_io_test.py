"""Checkpoints: Hugging Face's names and layouts, round trips, and the errors that name a tensor."""

import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from harness_s_jax.model import hf_io
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.params import param_shapes

DATA = pathlib.Path(__file__).parents[1] / "data" / "qwen35_tiny"


def random_params(config):
    """Any finite values: cheaper than compiling init_params for each config."""
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: random.normal(size=shape).astype(np.float32),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def small(**changes):
    sizes = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
    }
    return Qwen35Config(**sizes | changes)


def test_export_has_the_reference_names_shapes_and_values(tmp_path):
    config, params = hf_io.load(DATA)
    hf_io.save(tmp_path / "new", config, params)
    ours, theirs = (load_file(d / "model.safetensors") for d in (tmp_path / "new", DATA))
    assert ours.keys() == theirs.keys()
    same(ours, theirs)
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"model.safetensors", "config.json"}
    assert Qwen35Config.from_hf(json.loads((DATA / "config.json").read_text())) == config
    assert Qwen35Config.from_hf({"text_config": config.to_hf()}) == config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path, dtype, tied):
    config = small(dtype=dtype, tie_word_embeddings=tied)
    params = random_params(config)
    hf_io.save(tmp_path, config, params)
    again, loaded = hf_io.load(tmp_path)
    assert again == config
    assert ("head_DV" in loaded) != tied
    assert loaded["embed_VD"].dtype == dtype
    assert loaded["blocks"]["linear"]["A_log_H"].dtype == np.float32
    same(jax.tree.map(lambda x, y: x.astype(y.dtype), params, loaded), loaded)


def test_the_multimodal_wrapper_is_read(tmp_path):
    config, params = hf_io.load(DATA)
    tensors = {
        n.replace("model.", "model.language_model.", 1): x
        for n, x in load_file(DATA / "model.safetensors").items()
    }
    tensors |= {"model.visual.patch.weight": np.ones(3), "mtp.norm.weight": np.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    wrapper = {"model_type": "qwen3_5", "text_config": config.to_hf()}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    loaded_config, loaded = hf_io.load(tmp_path)
    assert loaded_config == config
    same(loaded, params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("model.layers.5.linear_attn.A_log"), "lacks tensor model.layers.5.lin"),
        (lambda x: x.update({"model.extra": np.ones(2)}), "holds tensor model.extra"),
        (lambda x: x.update({"model.norm.weight": np.ones(9)}), r"model.norm.weight has shape"),
        (lambda x: x["model.norm.weight"].fill(np.nan), "model.norm.weight holds NaN"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, change, message):
    config = small()
    hf_io.save(tmp_path, config, random_params(config))
    tensors = {n: x.copy() for n, x in load_file(tmp_path / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        hf_io.load(tmp_path)


def test_a_bad_tree_is_not_saved_over_a_good_one(tmp_path):
    config = small()
    params = random_params(config)
    hf_io.save(tmp_path, config, params)
    bad = params | {"norm_D": np.full(8, np.inf, np.float32)}
    with pytest.raises(ValueError, match=r"model.norm.weight holds NaN or infinity"):
        hf_io.save(tmp_path, config, bad)
    with pytest.raises(ValueError, match=r"too many"):
        hf_io.save(tmp_path, config, params | {"head_DV": params["embed_VD"].T})
    same(hf_io.load(tmp_path)[1], params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6; it must be a multiple of 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "qwen3_next"}, "model_type is 'qwen3_next'"),
        ({"layer_types": ["full_attention"] * 8}, "layer_types is"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "lacks rope_parameters.rope_theta"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
)
def test_an_unsupported_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Qwen35Config.from_hf(small().to_hf() | changes)
