"""Checkpoints: Hugging Face's names and layouts, round trips, and the errors that name a tensor."""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from harness_s_jax.model import hf_io, safetensors_file
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.params import param_shapes
from harness_s_jax.model.policy import SHIPPED, load_policy, save_policy

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


def stored(tmp_path, change=None, files=1, **changes):
    """A small checkpoint in tmp_path/stored whose tensors `change` may alter, and its params."""
    config, directory = small(**changes), tmp_path / "stored"
    params = random_params(config)
    hf_io.save(directory, config, params, max_shard_bytes=1 << 30 if files == 1 else 3000)
    if change:
        tensors = {n: x.copy() for n, x in load_file(directory / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, directory / "model.safetensors")
    return directory, params


@pytest.mark.parametrize("prefix", hf_io.PREFIXES)
def test_the_names_of_each_class_are_read(tmp_path, prefix):
    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
        skipped = ("model.visual.x", "visual.x", "mtp.norm.weight", "mtp.layers.0.self_attn.k")
        tensors |= {name: np.ones(3, np.int32) for name in skipped}

    directory, params = stored(tmp_path, rename)
    same(hf_io.load(directory)[1], params)
    wrapper = {"model_type": "qwen3_5", "text_config": small().to_hf()}
    (directory / "config.json").write_text(json.dumps(wrapper))
    assert hf_io.load(directory)[0] == small()
    same(hf_io.load(directory)[1], params)


LAYER = "model.layers.5.linear_attn.A_log"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop(LAYER), f"lacks tensor {LAYER}"),
        (lambda x: x.pop(EMBED), f"lacks tensor {EMBED}"),
        (lambda x: x.update({"model.extra": np.ones(2)}), "holds tensor model.extra"),
        (lambda x: x.update({LAYER + "_inv": np.ones(2)}), f"holds tensor {LAYER}_inv"),
        (lambda x: x.update({"model.norm.weight": np.ones(9)}), r"model.norm.weight has shape"),
        (lambda x: x.update({EMBED: x[EMBED].T.copy()}), rf"{EMBED} has shape \(8, 20\)"),
        (lambda x: x.update({EMBED: x[EMBED].astype(np.int8)}), f"{EMBED} is I8; it must be one"),
        (lambda x: x.update({LAYER: np.ones(2, np.float16)}), f"{LAYER} is F16 but that of an"),
        (lambda x: x[EMBED].__setitem__((19, 7), np.nan), f"{EMBED} holds NaN"),
        (lambda x: x[LAYER].__setitem__(1, -np.inf), f"{LAYER} holds NaN or infinity"),
        (lambda x: x.update({"lm_head.weight": x[EMBED] + 1}), "lm_head.weight differs from"),
        (
            lambda x: x.update({"lm_head.weight": x[EMBED].astype(np.float16)}),
            "lm_head.weight differs from the embedding",
        ),
        (
            lambda x: x.update({"model.language_model.norm.weight": np.ones(8)}),
            r"embed_tokens.weight and model.*norm.weight, two text models",
        ),
        (
            lambda x: [x.update({f"language_model.{n}": x.pop(n)}) for n in list(x)],
            "no text model under any of the prefixes",
        ),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, change, message):
    directory, _ = stored(tmp_path, change)
    for place in (None, on_one):
        with pytest.raises(ValueError, match=message):
            hf_io.load(directory, place)


def on_one(name, shape):
    return SingleDeviceSharding(jax.devices()[0])


def test_a_tied_head_that_is_stored_all_the_same_must_equal_the_embedding(tmp_path):
    directory, params = stored(tmp_path, lambda x: x.update({"lm_head.weight": x[EMBED].copy()}))
    same(hf_io.load(directory)[1], params)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def point_elsewhere(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"][LAYER] = index["weight_map"][EMBED]
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def copy_of_the_first(directory):
    first, second = sorted(directory.glob("model-*"))[:2]
    second.write_bytes(first.read_bytes())


@pytest.mark.parametrize(
    ("files", "change", "kind", "message"),
    [
        (1, lambda d: (d / "config.json").unlink(), FileNotFoundError, "has no config.json"),
        (1, lambda d: (d / "config.json").write_text("{"), ValueError, "config.json is not JSON"),
        (1, lambda d: (d / "config.json").write_text("[]"), ValueError, "holds a list, not an"),
        (1, lambda d: (d / "model.safetensors").unlink(), FileNotFoundError, "holds neither model"),
        (1, lambda d: cut(d / "model.safetensors"), ValueError, "is no whole safetensors file"),
        (
            1,
            lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com\n"),
            ValueError,
            "is no whole safetensors file",
        ),
        (
            2,
            lambda d: min(d.glob("model-*")).unlink(),
            FileNotFoundError,
            "names model-00001.*miss",
        ),
        (2, lambda d: cut(max(d.glob("model-*"))), ValueError, "is no whole safetensors file"),
        (2, point_elsewhere, ValueError, f"promises tensor {LAYER} in model-00001"),
        (2, copy_of_the_first, ValueError, f"both hold tensor {EMBED}"),
        (2, lambda d: save_file({}, d / "model.safetensors"), ValueError, "does not name it"),
        (
            2,
            lambda d: (d / "model.safetensors.index.json").write_text("{}"),
            ValueError,
            "has no weight_map",
        ),
    ],
)
def test_a_damaged_directory_is_a_sentence(tmp_path, files, change, kind, message):
    directory, _ = stored(tmp_path, files=files)
    hf_io.load(directory)
    change(directory)
    with pytest.raises(kind, match=message):
        hf_io.load(directory)


@pytest.mark.parametrize("tied", [True, False])
def test_placed_arrays_equal_numpy_ones(tmp_path, tied):
    directory, params = stored(tmp_path, tie_word_embeddings=tied)
    _, placed = hf_io.load(directory, on_one)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(placed))
    same(placed, params)


FOUR = """
import functools, math, pathlib, sys
import jax, numpy as np
from harness_s_jax.model import hf_io, safetensors_file, shard
source, target = map(pathlib.Path, sys.argv[1:])
mesh = shard.make_mesh(tensor=2)
read, count = safetensors_file.read, [0]
def counted(stored, block):
    value = read(stored, block)
    count[0] += value.size
    return value
safetensors_file.read = counted
config, placed = hf_io.load(source, functools.partial(shard.sharding_of, mesh))
assert len(placed["blocks"]["full"]["gate_DF"].addressable_shards) == 4
assert not placed["blocks"]["full"]["gate_DF"].is_fully_replicated
assert count[0] == sum(x.size for x in jax.tree.leaves(placed)), count
hf_io.save(target, config, placed)
_, whole = hf_io.load(source)
jax.tree.map(np.testing.assert_array_equal, placed, whole)
"""


def test_on_four_devices_each_reads_its_part_once_and_saves_the_same(tmp_path):
    directory, _ = stored(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FOUR, directory, tmp_path / "again"],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (load_file(d / "model.safetensors") for d in (directory, tmp_path / "again"))
    assert one.keys() == other.keys()
    same(one, other)


def test_dtype_spares_what_is_stored_in_float32(tmp_path):
    directory, params = stored(tmp_path, dtype="bfloat16")
    _, low = hf_io.load(directory)
    for place in (None, on_one):
        _, high = hf_io.load(directory, place, dtype="float32")
        assert {x.dtype for x in jax.tree.leaves(high)} == {np.dtype("float32")}
        same(high, jax.tree.map(lambda x: x.astype(np.float32), low))
    hf_io.save(directory, small(), params)
    _, cast = hf_io.load(directory, dtype="bfloat16")
    same(cast, low)
    assert cast["blocks"]["linear"]["norm_out_C"].dtype == np.float32
    assert cast["embed_VD"].dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="dtype is 'float16'; it must be one of"):
        hf_io.load(directory, dtype="float16")


def test_memory_stays_near_the_largest_array(tmp_path):
    config = small(vocab_size=40_000, hidden_size=256, intermediate_size=4096, num_hidden_layers=4)
    params = jax.tree.map(
        lambda shape: np.ones(shape, np.float32),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    largest = max(x.nbytes for x in jax.tree.leaves(params))
    assert largest > 8 * safetensors_file.BLOCK_BYTES
    assert total > 1.5 * largest

    def peak(work):
        tracemalloc.start()
        work()
        value = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return value

    assert peak(lambda: hf_io.save(tmp_path, config, params)) < 6 * safetensors_file.BLOCK_BYTES
    hf_io.load(DATA, on_one)  # what jax imports late is not counted
    assert peak(lambda: hf_io.load(tmp_path, on_one)) < 2 * largest


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def test_shards_are_what_the_library_reads_and_none_goes_stale(tmp_path):
    config, params = small(dtype="bfloat16"), random_params(small())
    whole, cut_up = tmp_path / "whole", tmp_path / "sharded"
    hf_io.save(whole, config, params)
    assert names(whole) == ["config.json", "model.safetensors"]
    hf_io.save(cut_up, config, params, max_shard_bytes=3000)
    index = json.loads((cut_up / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert shards[1] == f"model-00002-of-{len(shards):05d}.safetensors"
    read = {}
    for name in shards:
        with safe_open(cut_up / name, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            assert [index["weight_map"][n] for n in file.keys()] == [name] * len(file.keys())  # noqa: SIM118
            sizes = {n: file.get_tensor(n).nbytes for n in file.keys()}  # noqa: SIM118
            assert sum(sizes.values()) <= 3000
        read |= load_file(cut_up / name)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in read.values())
    expected = load_file(whole / "model.safetensors")
    assert read.keys() == expected.keys()
    assert {n: x.dtype for n, x in read.items()} == {n: x.dtype for n, x in expected.items()}
    same(read, expected)
    same(hf_io.load(cut_up)[1], hf_io.load(whole)[1])

    hf_io.save(cut_up, config, params, max_shard_bytes=5000)
    assert len(names(cut_up)) == 2 + len(
        set(
            json.loads((cut_up / "model.safetensors.index.json").read_text())["weight_map"].values()
        )
    )
    hf_io.save(cut_up, config, params)
    assert names(cut_up) == ["config.json", "model.safetensors"]
    same(hf_io.load(cut_up)[1], hf_io.load(whole)[1])


def test_a_bad_tree_is_not_saved_over_a_good_one(tmp_path):
    directory, params = stored(tmp_path, files=2)
    (directory / "notes.txt").write_text("mine")
    before = names(directory)
    late = jax.tree.map(np.copy, params)
    late["blocks"]["full"]["out_PD"][-1, -1, -1] = np.inf
    with pytest.raises(ValueError, match=r"layers.7.self_attn.o_proj.weight holds NaN or infin"):
        hf_io.save(directory, small(), late)
    with pytest.raises(ValueError, match=r"too many"):
        hf_io.save(directory, small(), params | {"head_DV": params["embed_VD"].T})
    with pytest.raises(ValueError, match=r"embed_VD.* has shape \(8, 20\)"):
        hf_io.save(directory, small(), params | {"embed_VD": params["embed_VD"].T})
    assert names(tmp_path) == ["stored"]
    assert names(directory) == before
    same(hf_io.load(directory)[1], params)


def test_an_interrupt_at_the_last_moment_changes_nothing(tmp_path, monkeypatch):
    directory, params = stored(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_file, "_swap", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hf_io.save(directory, small(), random_params(small()))
    assert names(tmp_path) == ["stored"]
    same(hf_io.load(directory)[1], params)


def test_other_files_stay_and_other_directories_are_refused(tmp_path):
    directory, params = stored(tmp_path)
    (directory / "tokenizer.model").write_bytes(b"words")
    (directory / "logs").mkdir()
    (directory / "logs" / "a.txt").write_text("a")
    hf_io.save(directory, small(), params, max_shard_bytes=3000)
    assert (directory / "tokenizer.model").read_bytes() == b"words"
    assert (directory / "logs" / "a.txt").read_text() == "a"
    assert not (directory / "model.safetensors").exists()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "results.csv").write_text("1")
    with pytest.raises(ValueError, match="neither empty nor a checkpoint"):
        hf_io.save(tmp_path / "work", small(), params)
    with pytest.raises(ValueError, match="neither empty nor a checkpoint"):
        hf_io.save(tmp_path / "work" / "results.csv", small(), params)
    assert names(tmp_path) == ["stored", "work"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    directory, params = stored(tmp_path)
    kept = [f"stored.part-{os.getppid()}", "stored.part-x", "other.part-999999999"]
    for name in ("stored.part-999999999", f"stored.part-{os.getpid()}", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    hf_io.save(directory, small(), params)
    assert names(tmp_path) == sorted(["stored", *kept])


def test_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    directory, params = stored(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    changed = jax.tree.map(lambda x: x + 1, params)
    hf_io.save(directory, small(), changed)
    same(hf_io.load(directory)[1], changed)
    rename = pathlib.Path.rename

    def fails(path, target):
        if ".part-" in path.name:
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", fails)
    with pytest.raises(OSError, match="no"):
        hf_io.save(directory, small(), params)
    monkeypatch.setattr(pathlib.Path, "rename", rename)
    same(hf_io.load(directory)[1], changed)
    directory.rename(tmp_path / "stored.old-999999999")  # as a kill between the two leaves it
    bad = params | {"norm_D": np.full(8, np.inf, np.float32)}
    with pytest.raises(ValueError, match="holds NaN"):
        hf_io.save(directory, small(), bad)
    assert names(tmp_path) == ["stored"]
    same(hf_io.load(directory)[1], changed)


def published(tmp_path):
    """A small checkpoint as the wrapper is published: with vision, MTP and companions."""
    config, directory = small(dtype="bfloat16"), tmp_path / "published"
    hf_io.save(directory, config, random_params(config))
    tensors = {
        "model.language_model." + n.removeprefix("model."): x
        for n, x in load_file(directory / "model.safetensors").items()
    }
    others = {
        "model.visual.a": np.full((3, 5), np.nan, ml_dtypes.bfloat16),
        "model.visual.scalar": np.array(7, np.int64),
        "mtp.empty": np.zeros((0, 4), np.float32),
        "mtp.fc.weight": np.arange(7, dtype=np.uint8),
    }
    save_file(tensors | others, directory / "model.safetensors", metadata={"format": "pt"})
    text = config.to_hf() | {"max_position_embeddings": 262144, "torch_dtype": "bfloat16"}
    wrapper = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 2},
    }
    (directory / "config.json").write_text(json.dumps(wrapper))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "README.md"):
        (directory / name).write_text(name)
    (directory / "preprocessor_config.json").write_text("{}")
    return directory, config, wrapper, others


def test_a_source_gives_names_untouched_tensors_and_companions(tmp_path):
    source, config, _, others = published(tmp_path)
    params = jax.tree.map(lambda x: x * 2, hf_io.load(source)[1])
    hf_io.save(tmp_path / "new", config, params, source=source)
    assert names(tmp_path / "new") == [
        *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
        *("preprocessor_config.json", "tokenizer.json"),
    ]
    old, new = (load_file(d / "model.safetensors") for d in (source, tmp_path / "new"))
    assert old.keys() == new.keys()
    for name, value in others.items():
        assert new[name].dtype == value.dtype
        assert new[name].shape == value.shape
        assert new[name].tobytes() == value.tobytes()
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vision_config"] == {
        "depth": 2
    }
    same(hf_io.load(tmp_path / "new")[1], params)
    hf_io.save(source, config, params, source=source, max_shard_bytes=3000)  # onto itself
    assert (source / "README.md").exists()
    same(hf_io.load(source)[1], params)


def test_a_source_keeps_of_config_what_did_not_change(tmp_path):
    source, _, wrapper, _ = published(tmp_path)
    changed = small(dtype="float32", tie_word_embeddings=False, rope_theta=1e6)
    hf_io.save(tmp_path / "new", changed, random_params(changed), source=source)
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert Qwen35Config.from_hf(written) == changed
    text = wrapper["text_config"] | {"dtype": "float32", "tie_word_embeddings": False}
    del text["torch_dtype"]
    text["rope_parameters"] = text["rope_parameters"] | {"rope_theta": 1e6}
    assert written == wrapper | {"text_config": text, "tie_word_embeddings": False}
    assert "lm_head.weight" in load_file(tmp_path / "new" / "model.safetensors")


def test_a_policy_is_saved_as_a_whole(tmp_path):
    policy = load_policy(SHIPPED)
    directory = tmp_path / "policy"
    save_policy(directory, policy.config, policy.params, policy.template.tokenizer)
    (directory / "warmstart.json").write_text("{}")
    (directory / "tokenizer.model").write_bytes(b"old")
    bad = policy.params | {"norm_D": policy.params["norm_D"] * np.nan}
    with pytest.raises(ValueError, match=r"model.norm.weight holds NaN"):
        save_policy(directory, policy.config, bad, policy.template.tokenizer)
    assert (directory / "tokenizer.model").read_bytes() == b"old"
    save_policy(directory, policy.config, policy.params, policy.template.tokenizer)
    assert names(directory) == [
        *("config.json", "model.safetensors", "tokenizer.model", "warmstart.json")
    ]
    same(load_policy(directory).params, policy.params)


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
