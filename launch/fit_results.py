"""What launch/check_fit.py finds out about programs: plain data, the file that keeps it, tables."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path

from harness_s_jax.model.remat import Remat


@dataclasses.dataclass(frozen=True)
class Setup:
    """One program to compile."""

    model: str
    program: str
    topology: str
    tokens: int  # a row, or the longest context of a slot
    rows: int  # of one forward and backward pass over all chips; slots of a host's sampler
    tensor: int  # the tensor axis of its mesh
    remat: Remat = "none"


@dataclasses.dataclass(frozen=True)
class Result:
    """What the compiler says of one program. A chip's GiB, the resident parts included."""

    model: str
    program: str
    topology: str
    rows: int
    tokens: int
    fits: bool
    gib_per_chip: float  # with what else lives on the chip meanwhile; of a lower bound if not fits
    hbm_gib: float
    compile_s: float
    tensor: int
    remat: str
    arguments_gib: float
    temporaries_gib: float
    beside_gib: float  # resident but no argument of the program
    model_tflops: float  # of the training step, all chips together; 0 for the sampler's programs


@dataclasses.dataclass(frozen=True)
class Resident:
    """What of a cell stays on a chip, in GiB."""

    optimizer: float  # float32 parameters and both moments, over all chips
    rollout: float  # the sampler's copy, over one host's chips
    cache: float  # of its slots
    hbm: float  # what there is


class Store:
    """Results in a file of JSON lines, found again by setup and by what it was compiled from."""

    def __init__(self, path: Path, sources: list[str]):
        self._path, self._sources = path, sources
        self._found = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):  # a write that was cut off
                entry = json.loads(line)
                self._found[entry["key"]] = Result(**entry["result"])

    def get(self, setup: Setup) -> Result | None:
        return self._found.get(self._key(setup))

    def put(self, setup: Setup, result: Result) -> Result:
        """Kept at once, so that an interrupted sweep loses one program at most."""
        key = self._key(setup)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            # The line break in front ends a line that was cut off.
            file.write("\n" + json.dumps({"key": key, "result": dataclasses.asdict(result)}) + "\n")
        self._found[key] = result
        return result

    def _key(self, setup: Setup) -> str:
        return json.dumps([dataclasses.astuple(setup), self._sources])


def markdown(table: Iterable[Result], kept: Iterable[tuple[tuple, Resident]]) -> str:
    """Two tables: the programs, and what stays on a chip."""
    lines = [
        "| model | program | topology | mesh (fsdp, tensor) | rows x tokens | remat | arguments |"
        " temporaries | beside | GiB a chip | HBM | fits | compile s | model TFLOP |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    table = list(table)
    for r in table:
        train = r.program == "train"
        mesh = f"({r.rows}, {r.tensor})" if train else f"(1, {r.tensor})"
        cells = (
            *(r.model, r.program, r.topology, mesh, f"{r.rows} x {r.tokens:,}"),
            *(r.remat if train else "", f"{r.arguments_gib:.1f}", f"{r.temporaries_gib:.1f}"),
            *(f"{r.beside_gib:.1f}", f"{r.gib_per_chip:.1f}", f"{r.hbm_gib:.1f}"),
            *("yes" if r.fits else "NO", f"{r.compile_s:.0f}"),
            f"{r.model_tflops:,.0f}" if train else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| model | topology | tokens | optimizer | rollout copy | cache | sampling: all three |"
        " update, rollout copy and cache freed | update, both kept | HBM |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, topology, tokens), r in kept:
        update = next(
            (x.gib_per_chip for x in table if x.program == "train"
             and (x.model, x.topology, x.tokens) == (model, topology, tokens)),
            math.nan,
        )  # fmt: skip
        sizes = (r.optimizer, r.rollout, r.cache, r.optimizer + r.rollout + r.cache)
        sizes += (update, update + r.rollout + r.cache, r.hbm)
        cells = (
            model,
            topology,
            f"{tokens:,}",
            *(f"{size:.1f}".replace("nan", "-") for size in sizes),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
