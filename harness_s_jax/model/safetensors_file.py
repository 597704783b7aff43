"""The files of a checkpoint directory: read by the block, written as a stream, replaced as a whole.

Nothing here knows a model. The container is 8 bytes with the header's length (little-endian), the
header (JSON: dtype, shape and byte range of each tensor), and the tensors one after another.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from harness_s_jax.model.config import DTYPES

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
BLOCK_BYTES = 1 << 22  # what is read, converted and written at a time
FLOATS = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("f2")}
# What an export takes along from the checkpoint that the model came from.
COMPANIONS = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*preprocessor_config.json", "processor_config.json"),
    *("generation_config.json", "LICENSE*"),
)


class Stored(NamedTuple):
    """A tensor in a file."""

    file: pathlib.Path
    name: str
    dtype: str  # safetensors' name: "BF16"
    shape: tuple[int, ...]


class Tensor(NamedTuple):
    """A tensor to write; `blocks` gives its bytes in pieces, as buffers, first to last."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: Callable[[], Iterable[Any]]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: give a checkpoint directory.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object: copy it again.")
    return content


def catalog(directory: pathlib.Path) -> dict[str, Stored]:
    """Every tensor of model.safetensors, or of the files that the index names; headers only.

    Raises:
      FileNotFoundError: there are no weights, or a file that the index names is missing.
      ValueError: a file is damaged, index and files disagree, or two files hold the same tensor.
    """
    single, index = directory / WEIGHTS, directory / INDEX
    promised = {}
    if index.is_file():
        promised = read_json(index).get("weight_map")
        if not promised or not isinstance(promised, dict):
            raise ValueError(f"{index} has no weight_map: copy it again.")
        if single.is_file() and WEIGHTS not in promised.values():
            raise ValueError(
                f"{directory} holds {WEIGHTS} and also {INDEX}, which does not name it: remove the"
                " one that is out of date."
            )
    elif not single.is_file():
        raise FileNotFoundError(f"{directory} holds neither {WEIGHTS} nor {INDEX}: copy one there.")
    found: dict[str, Stored] = {}
    for name in sorted(set(promised.values())) or [WEIGHTS]:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{index} names {name}, which is missing: copy it there too.")
        for stored in _tensors(directory / name):
            if stored.name in found:
                raise ValueError(
                    f"{found[stored.name].file} and {stored.file} both hold tensor {stored.name}:"
                    " remove the file that does not belong to the checkpoint."
                )
            found[stored.name] = stored
    for tensor, name in promised.items():
        if tensor not in found or found[tensor].file.name != name:
            raise ValueError(
                f"{index} promises tensor {tensor} in {name}, which lacks it: copy both again."
            )
    return found


def _tensors(path: pathlib.Path) -> list[Stored]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return [Stored(path, n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()]


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no whole safetensors file ({error}): it was cut short or damaged, or is a"
            " Git LFS pointer; download it again."
        ) from None


def read(stored: Stored, block: tuple[slice, ...]) -> np.ndarray:
    """A block of a tensor. The file is opened anew each time: what a map of it has touched counts
    as our memory until it is closed."""
    with _opened(stored.file) as file:
        return file.get_slice(stored.name)[block]


def on_host(array: Any, block: tuple[slice, ...]) -> np.ndarray:
    """A block of a numpy or jax array; of a jax array no more than that leaves the devices."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)[block]
    out = np.empty([s.stop - s.start for s in block], array.dtype)
    for shard in array.addressable_shards:
        held = [slice(*s.indices(n)[:2]) for s, n in zip(shard.index, array.shape, strict=True)]
        both = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(held, block, strict=True)
        ]
        if shard.replica_id == 0 and all(s.start < s.stop for s in both):
            starts = [s.start - h.start for s, h in zip(both, held, strict=True)]
            sizes = [s.stop - s.start for s in both]
            value = jax.lax.dynamic_slice(shard.data, starts, sizes)
            to = (
                slice(s.start - b.start, s.stop - b.start) for s, b in zip(both, block, strict=True)
            )
            out[tuple(to)] = np.asarray(value)
    return out


def dtype_name(dtype: str) -> str:
    """safetensors' name of a config's dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {DTYPES}.")
    return {"float32": "F32", "bfloat16": "BF16"}[dtype]


def copy_companions(source: pathlib.Path, directory: pathlib.Path) -> None:
    """Copy the tokenizer and what else belongs to a checkpoint, but weights and config.json."""
    for path in itertools.chain.from_iterable(source.glob(name) for name in COMPANIONS):
        if path.is_file():
            shutil.copyfile(path, directory / path.name)


def copied(stored: Stored) -> Tensor:
    """The same tensor, to be written byte for byte, whatever its dtype."""
    with stored.file.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[stored.name]["data_offsets"]

    def blocks() -> Iterator[bytes]:
        with stored.file.open("rb") as file:
            file.seek(8 + length + begin)
            for at in range(begin, end, BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, end - at))

    return Tensor(stored.name, stored.dtype, stored.shape, end - begin, blocks)


def write(directory: pathlib.Path, tensors: Iterable[Tensor], max_shard_bytes: int) -> None:
    """Write model.safetensors, or shards and their index where one file would be larger than that.

    A tensor that is larger has a file of its own.
    """
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in [*shards[-1], tensor]) > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        _write_file(directory / WEIGHTS, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: pathlib.Path, tensors: Sequence[Tensor]) -> None:
    """Wide dtypes first, so that every tensor is aligned to its own."""
    tensors = sorted(tensors, key=lambda t: -(t.nbytes // (math.prod(t.shape) or 1)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        offsets = [end, end := end + t.nbytes]
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            written = sum(file.write(block) for block in t.blocks())
            if written != t.nbytes:
                raise ValueError(f"tensor {t.name} gave {written} bytes; its shape has {t.nbytes}.")


@contextlib.contextmanager
def written_aside(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A new directory beside `directory`, which takes its place if the block ends well.

    An earlier checkpoint there (config.json and weights) is replaced in one step; its other files
    are carried over unless the block wrote them anew. If the block fails it stays as it was. What
    a killed process left behind is removed.

    Raises:
      ValueError: `directory` holds something else.
    """
    directory = pathlib.Path(directory).resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    if directory.exists() and not (directory.is_dir() and _replaceable(directory)):
        raise ValueError(
            f"{directory} is neither empty nor a checkpoint ({CONFIG} and {WEIGHTS} or {INDEX}):"
            " save elsewhere, or remove it first."
        )
    part = directory.with_name(f"{directory.name}.part-{os.getpid()}")
    try:
        part.mkdir()
        yield part
        if directory.exists():
            _carry_over(directory, part)
            shutil.copymode(directory, part)
        for path in (*part.rglob("*"), part):
            _sync(path)
        _swap(part, directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # after the swap: the earlier checkpoint


def _sweep(directory: pathlib.Path) -> None:
    """Remove what processes that run no more left; put an earlier checkpoint back (see `_swap`)."""
    for path in directory.parent.iterdir():
        match = re.fullmatch(re.escape(directory.name) + r"\.(part|old)-(\d+)", path.name)
        if match and not (_runs(int(match[2])) and int(match[2]) != os.getpid()):
            if match[1] == "old" and not directory.exists():
                path.rename(directory)
            else:
                shutil.rmtree(path)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _replaceable(directory: pathlib.Path) -> bool:
    names = {path.name for path in directory.iterdir()}
    return not names or (CONFIG in names and not names.isdisjoint({WEIGHTS, INDEX}))


def _carry_over(old: pathlib.Path, new: pathlib.Path) -> None:
    """Link (where links exist) the files of `old` that are neither its checkpoint nor in `new`."""
    owned = {CONFIG, INDEX, *(path.name for path in old.glob("model*.safetensors"))}
    if (old / INDEX).is_file():
        with contextlib.suppress(ValueError):
            owned |= set(read_json(old / INDEX).get("weight_map", {}).values())
    for path in old.iterdir():
        if path.name not in owned and not (new / path.name).exists():
            if path.is_dir():
                shutil.copytree(path, new / path.name, copy_function=_link)
            else:
                _link(path, new / path.name)


def _link(source: str | pathlib.Path, target: str | pathlib.Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(part: pathlib.Path, directory: pathlib.Path) -> None:
    """Give `part` the name `directory`; what had it is then at `part`, or gone.

    Linux exchanges two names in one step. Where the file system cannot, the earlier directory is
    away for a moment: a process killed then leaves it as <name>.old-<pid>.
    """
    if not directory.exists():
        part.rename(directory)
        return
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if exchange and exchange(here, os.fsencode(part), here, os.fsencode(directory), both) == 0:
        return
    old = directory.with_name(f"{directory.name}.old-{os.getpid()}")
    directory.rename(old)
    try:
        part.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    shutil.rmtree(old)
