"""What we export, transformers loads, and computes with it exactly what it did before.

Optional: needs torch, which this project does not. In an environment with torch, transformers,
pytest and this project's requirements:

    JAX_PLATFORMS=cpu python -m pytest tests/model/hf_transformers_test.py
"""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from harness_s_jax.model import hf_io, shard

torch = pytest.importorskip("torch")
qwen3_5 = pytest.importorskip("transformers.models.qwen3_5")

DATA = pathlib.Path(__file__).parents[1] / "data" / "qwen35_tiny"
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def logits(kind, directory):
    """Of the reference's token ids, by the class `kind` from a checkpoint directory."""
    torch.set_num_threads(1)
    model, report = kind.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert not report["unexpected_keys"]
    ids = torch.from_numpy(np.load(DATA / "reference.npz")["ids_BT"]).long()
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.float().numpy()


def through_ours(directory, target, **options):
    """Load the checkpoint into jax arrays and export it again."""
    place = functools.partial(shard.sharding_of, shard.make_mesh())
    config, params = hf_io.load(directory, place)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
    hf_io.save(target, config, params, **options)


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory):
    """A tiny multimodal checkpoint around the text model of qwen35_tiny, saved by transformers."""
    torch.manual_seed(0)
    text = json.loads((DATA / "config.json").read_text())
    config = qwen3_5.Qwen3_5Config(
        text_config=text, vision_config=VISION, tie_word_embeddings=True,
        image_token_id=440, video_token_id=441, vision_start_token_id=442, vision_end_token_id=443,
    )  # fmt: skip
    model = qwen3_5.Qwen3_5ForConditionalGeneration(config).float()
    weights = {
        n.removeprefix("model."): torch.from_numpy(x.copy())
        for n, x in load_file(DATA / "model.safetensors").items()
    }
    assert not model.model.language_model.load_state_dict(weights).missing_keys
    directory = tmp_path_factory.mktemp("wrapper")
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("max_shard_bytes", [hf_io.MAX_SHARD_BYTES, 200_000])
@pytest.mark.parametrize("source", [None, DATA])
def test_the_text_model_is_the_same(tmp_path, source, max_shard_bytes):
    through_ours(DATA, tmp_path, source=source, max_shard_bytes=max_shard_bytes)
    original = logits(qwen3_5.Qwen3_5ForCausalLM, DATA)
    np.testing.assert_array_equal(logits(qwen3_5.Qwen3_5ForCausalLM, tmp_path), original)


def test_the_wrapper_is_the_same(wrapper, tmp_path):
    through_ours(wrapper, tmp_path, source=wrapper)
    kind = qwen3_5.Qwen3_5ForConditionalGeneration
    np.testing.assert_array_equal(logits(kind, tmp_path), logits(kind, wrapper))
    ours, theirs = (load_file(d / "model.safetensors") for d in (tmp_path, wrapper))
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("model.visual.") for name in ours)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert ours[name].tobytes() == value.tobytes()
    same = logits(qwen3_5.Qwen3_5ForCausalLM, DATA)
    np.testing.assert_array_equal(logits(kind, tmp_path), same)


@pytest.mark.parametrize("kind", ["Qwen3_5Model", "Qwen3_5TextModel"])
def test_the_prefixes_are_those_that_the_classes_save(wrapper, tmp_path, kind):
    """And a body without a head is read as well."""
    model = qwen3_5.Qwen3_5ForConditionalGeneration.from_pretrained(wrapper).model
    body = model if kind == "Qwen3_5Model" else model.language_model
    assert type(body).__name__ == kind
    body.save_pretrained(tmp_path)
    prefix = {name: prefix for prefix, name in hf_io.PREFIXES.items()}[kind]
    assert f"{prefix}embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    _, params = hf_io.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, params, hf_io.load(DATA)[1])


def test_a_bfloat16_model_is_the_same(tmp_path):
    """A_log and the gated norm, which are exported in float32, are rounded there and not again."""
    model = qwen3_5.Qwen3_5ForCausalLM.from_pretrained(DATA, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "old")
    through_ours(tmp_path / "old", tmp_path / "new")
    dtypes = {n: x.dtype for n, x in load_file(tmp_path / "new" / "model.safetensors").items()}
    assert dtypes["model.layers.0.linear_attn.A_log"] == np.float32
    assert dtypes["model.layers.0.linear_attn.dt_bias"] == "bfloat16"
    kind = qwen3_5.Qwen3_5ForCausalLM
    np.testing.assert_array_equal(logits(kind, tmp_path / "new"), logits(kind, tmp_path / "old"))
