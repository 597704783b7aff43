"""Writes a checkpoint of random weights in full shapes, and measures loading one. Not a test.

    python tests/data/make_random_checkpoint.py --model=4b /tmp/random4b
    python tests/data/make_random_checkpoint.py --load /tmp/random4b

The first writes bfloat16 tensors under the multimodal wrapper's names, sharded with an index, a
few megabytes of memory at a time: 8.4 GB for 4b, 17.9 GB for 9b. The values have the spread of a
fresh model, but are cut from one pool of normal numbers, so that they repeat. The second loads
them into jax arrays on the CPU and prints what that took as JSON.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import threading
import time

import jax
import numpy as np

from harness_s_jax.model import hf_io, safetensors_file, shard
from harness_s_jax.model.config import PRESETS

POOL = 1 << 21
PREFIX = "model.language_model."
# (mean, standard deviation) of each kind of tensor; others have 1/sqrt(fan in).
SPREAD = {
    "linear_attn.norm": (1.0, 0.02),
    "norm": (0.0, 0.02),
    "A_log": (1.0, 0.5),
    "dt_bias": (-4.0, 1.0),
    "embed_tokens": (0.0, 0.02),
}
OTHERS = {"model.visual.pos_embed.weight": (2304, 1152), "mtp.norm.weight": (2560,)}


def blocks(name, shape, dtype, pool):
    """The bytes of a tensor, a piece of the pool at a time."""
    found = (spread for part, spread in SPREAD.items() if part in name)
    mean, deviation = next(found, (0.0, shape[-1] ** -0.5))
    random = np.random.default_rng(list(name.encode()))
    left = math.prod(shape)
    while left:
        at = int(random.integers(POOL // 2))
        piece = pool[at : at + left] * np.float32(deviation) + np.float32(mean)
        yield piece.astype(safetensors_file.FLOATS[dtype]).view(np.uint8).data
        left -= piece.size


def make(directory, config):
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32)
    shapes = {entry.theirs: entry.shape for entry in hf_io.entries(config, PREFIX)}
    tensors = []
    for name, shape in (shapes | OTHERS).items():
        dtype = "F32" if name.endswith(("A_log", "linear_attn.norm.weight")) else "BF16"
        size = math.prod(shape) * safetensors_file.FLOATS[dtype].itemsize
        give = functools.partial(blocks, name, shape, dtype, pool)
        tensors.append(safetensors_file.Tensor(name, dtype, shape, size, give))
    wrapper = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": config.to_hf(),
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    with safetensors_file.written_aside(directory) as part:
        (part / safetensors_file.CONFIG).write_text(json.dumps(wrapper, indent=2) + "\n")
        safetensors_file.write(part, tensors, hf_io.MAX_SHARD_BYTES)


def resident():
    """Bytes of this process in memory, touched pages of mapped files among them."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(directory, dtype):
    """Load into jax arrays on the CPU, whose memory is the host's; sampled every millisecond.

    `peak_rss_above_device_copy` is the most that was in memory at any time beyond what was there
    before and the arrays loaded so far, the one under way counted whole.
    """
    mesh, stored = shard.make_mesh(), safetensors_file.catalog(pathlib.Path(directory)).values()
    jax.block_until_ready(jax.device_put(np.zeros(1), jax.devices()[0]))
    before, held, peak, above, done = resident(), 0, 0, 0, threading.Event()

    def place(name, shape):
        nonlocal held
        kept = name in hf_io.FLOAT32 or dtype == "float32"
        held += math.prod(shape) * (4 if kept else 2)
        return shard.sharding_of(mesh, name, shape)

    def watch():
        nonlocal peak, above
        while not done.wait(0.001):
            now = resident()
            peak, above = max(peak, now), max(above, now - before - held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    _, params = hf_io.load(directory, place, dtype=dtype)
    seconds = time.monotonic() - started
    done.set()
    watcher.join()
    leaves = jax.tree.leaves(params)
    assert held == sum(x.nbytes for x in leaves)
    sizes = [math.prod(s.shape) * safetensors_file.FLOATS[s.dtype].itemsize for s in stored]
    return {
        "seconds": round(seconds, 1),
        "bytes": held,
        "largest_tensor_bytes": max(sizes),
        "largest_array_bytes": max(x.nbytes for x in leaves),
        "rss_before": before,
        "peak_rss_bytes": peak,
        "peak_rss_above_device_copy": above,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--model", choices=sorted(PRESETS), default="4b")
    parser.add_argument("--load", action="store_true", help="measure loading what is there")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="to load as, if not as is")
    arguments = parser.parse_args()
    started = time.monotonic()
    if arguments.load:
        print(json.dumps(measure(arguments.directory, arguments.dtype)))
    else:
        make(arguments.directory, PRESETS[arguments.model])
        print(json.dumps({"seconds": round(time.monotonic() - started, 1), "rss": resident()}))


if __name__ == "__main__":
    main()
