"""The import table of the design as data, and checks that the tree keeps to it.

Who may import whom is what keeps the host side free of jax, the learner free of harnesses and the
joins readable. A new file needs a row here before it may exist.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("harness_s_jax", "experiments", "launch")

# Part -> what it may import of ours, besides itself. Parts are modules or packages under
# harness_s_jax; "envs" stands for everything in it, "envs.base" for that module alone.
TABLE: dict[str, set[str]] = {
    "types": set(),
    "config": set(),
    "metrics": {"types"},
    "llm": {"types"},
    "toolcalls": {"types"},
    "ledger": {"types"},
    "rows": set(),
    "envs": {"types"},
    "harness": {"types", "toolcalls", "ledger", "envs.base"},
    "rollout": {"types", "envs", "harness"},
    "router": {"types", "llm", "harness.predicates"},
    "rescue": {"types", "metrics", "rollout", "router"},
    "evolution": {"types", "llm", "harness", "rollout"},
    "batch": {"types", "rows"},
    "model": {"types"},
    "sampler": {"types", "toolcalls", "ledger", "model"},
    "learner": {"types", "rows", "model"},
    "analysis": {"types", "metrics", "harness.predicates", "rollout.traces"},
    # What the joins begin with: parts from a configuration.
    "parts": {"types", "config", "envs", "harness", "rollout", "model", "sampler", "learner"},
    "hosts": set(),
    "routing": {"types", "hosts", "parts", "rollout", "router"},
}
JOINS = {"evolve", "train", "evaluate", "warmstart"}
EXPERIMENTS_MAY = JOINS | {"types", "config", "analysis", "hosts"}

HOST = {
    *("types", "config", "metrics", "llm", "toolcalls", "ledger", "rows", "envs", "harness"),
    *("rollout", "router", "rescue", "evolution", "batch", "analysis"),
}
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax"}

TOP_LEVEL = {
    *("setup.py", "README.md", "requirements.txt", "harness_s_jax", "experiments", "launch"),
    *("tests", "docs", "notebooks", "CHANGELOG.md", "LICENSE"),
}
MAX_LINES = 400
MAX_LINES_MODEL = 600
MAX_LINES_TRAIN = 300


def module_name(path: Path) -> str:
    """The dotted name of a file, given from the root: a/b.py is "a.b", a/__init__.py is "a"."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, part: str) -> bool:
    """Whether `module` is `part` or lies in it."""
    return module == part or module.startswith(f"{part}.")


def source_files() -> dict[str, Path]:
    """Every Python file of ours: module name to path from the root."""
    paths = (p.relative_to(ROOT) for top in OURS for p in sorted((ROOT / top).rglob("*.py")))
    return {module_name(p): p for p in paths if "assets" not in p.parts}


def imports(source: str, path: Path, modules: Set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, module) for every import in `source`, at any level of nesting.

    `from a import b` is a.b where that is a module of ours (one of `modules`), else a. Calls of
    import_module and __import__ with a constant count as well.
    """
    package = module_name(path) if path.name == "__init__.py" else module_name(path.parent)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                if level:
                    above = package.split(".")[: len(package.split(".")) - level + 1]
                    module = ".".join([*above, module] if module else above)
                for alias in names:
                    inner = f"{module}.{alias.name}"
                    yield node.lineno, inner if inner in modules else str(module)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ) if not name.startswith("."):
                yield node.lineno, name


def may_import(module: str) -> set[str] | None:
    """Parts of ours that `module` may import, with their full names; None if no row fits it."""
    top, _, inner = module.partition(".")
    prefix = "harness_s_jax."
    if top == "launch":
        return set(OURS)
    if top == "experiments":
        return {"experiments"} | {prefix + part for part in EXPERIMENTS_MAY}
    if module == "harness_s_jax":
        return set()
    part = inner.partition(".")[0]
    if part in JOINS:
        return {prefix + other for other in TABLE} if inner == part else None
    return {prefix + p for p in TABLE[part] | {part}} if part in TABLE else None


def violations(source: str, path: Path, modules: Set[str]) -> list[str]:
    """What is wrong with the imports of one file, one sentence each."""
    module = module_name(path)
    allowed = may_import(module)
    if allowed is None:
        return [f"{path}: no row of the import table fits it: add one to TABLE, or move the file."]
    part = module.removeprefix("harness_s_jax.").partition(".")[0]
    host = module == "harness_s_jax" or (within(module, "harness_s_jax") and part in HOST)
    # The top package holds nothing of its own: to name it bare is to reach nothing.
    found = []
    for line, target in imports(source, path, modules):
        top = target.partition(".")[0]
        if host and top in DEVICE_LIBRARIES:
            found.append(
                f"{path}:{line}: imports {target}, but {part} is host code: no {top} there."
            )
        elif (
            top in OURS
            and target != "harness_s_jax"
            and not any(within(target, a) for a in allowed)
        ):
            found.append(f"{path}:{line}: imports {target}, which {module} may not import.")
    return found


def test_imports_keep_to_the_table():
    files = source_files()
    found = [
        sentence
        for path in files.values()
        for sentence in violations((ROOT / path).read_text(encoding="utf-8"), path, files.keys())
    ]
    assert not found, "\n".join(found)


# What the tree may look like one day, for the checks of the checker below.
PRETEND = {
    f"harness_s_jax.{m}"
    for m in (
        *("types", "llm", "batch", "train", "evaluate", "rollout", "rollout.group", "router"),
        *("harness", "harness.loop", "harness.predicates", "envs", "envs.base", "envs.dbbench"),
        *("model", "model.qwen3_5", "learner", "learner.step", "metrics", "analysis"),
    )
} | {"harness_s_jax", "experiments", "experiments.appworld_4b"}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("harness_s_jax/types.py", "import harness_s_jax.llm"),
        ("harness_s_jax/learner/step.py", "from harness_s_jax.harness import loop"),
        ("harness_s_jax/learner/step.py", "from ..harness.loop import run"),
        ("harness_s_jax/learner/__init__.py", "from .. import harness"),
        ("harness_s_jax/router/vote.py", "from harness_s_jax.harness import loop"),
        ("harness_s_jax/router/vote.py", "from harness_s_jax import harness"),
        ("harness_s_jax/harness/loop.py", "from harness_s_jax.envs import dbbench"),
        ("harness_s_jax/harness/external/dsh.py", "from ...envs import dbbench"),
        ("harness_s_jax/batch.py", "def f():\n    if 1:\n        import jax.numpy as jnp"),
        ("harness_s_jax/envs/base.py", "from flax import nnx"),
        (
            "harness_s_jax/rescue.py",
            "import importlib\nimportlib.import_module('orbax.checkpoint')",
        ),
        ("harness_s_jax/__init__.py", "import jax"),
        ("harness_s_jax/__init__.py", "from harness_s_jax import types"),
        ("harness_s_jax/train.py", "from harness_s_jax import evaluate"),
        ("harness_s_jax/train.py", "import experiments"),
        ("harness_s_jax/analysis/report.py", "import harness_s_jax.train"),
        ("experiments/appworld_4b.py", "from harness_s_jax.rollout import group"),
        ("experiments/appworld_4b.py", "import launch.check_fit"),
        ("harness_s_jax/utils.py", ""),
        ("harness_s_jax/train/loop.py", ""),
    ],
)
def test_checker_catches(file: str, source: str):
    assert len(violations(source, Path(file), PRETEND)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("harness_s_jax/router/vote.py", "from harness_s_jax.harness import predicates"),
        ("harness_s_jax/router/vote.py", "from harness_s_jax.harness.predicates import turns"),
        ("harness_s_jax/router/vote.py", "from . import profiles"),
        ("harness_s_jax/harness/external/dsh.py", "from ..loop import run"),
        (
            "harness_s_jax/learner/step.py",
            "import jax, optax\nfrom harness_s_jax import model, types",
        ),
        ("harness_s_jax/train.py", "from harness_s_jax.learner import step\nimport jax"),
        ("harness_s_jax/warmstart.py", "from harness_s_jax.rollout.group import run"),
        ("experiments/appworld_4b.py", "from harness_s_jax import evaluate, train, types"),
        ("experiments/dbbench_4b.py", "from experiments import appworld_4b"),
        ("launch/check_fit.py", "from harness_s_jax.model import qwen3_5\nimport jax"),
        ("harness_s_jax/llm.py", "import jaxtyping, openai"),
    ],
)
def test_checker_lets_pass(file: str, source: str):
    assert violations(source, Path(file), PRETEND) == []


def reach(part: str) -> set[str]:
    """The parts that `part` reaches through the table, however indirectly."""
    seen: set[str] = set()
    todo = [part]
    while todo:
        new = {other.partition(".")[0] for other in TABLE[todo.pop()]} - seen
        seen |= new
        todo += new
    return seen


def test_the_table_keeps_the_sides_apart():
    assert reach("learner").isdisjoint({"harness", "envs", "rollout", "router", "evolution"})
    assert reach("sampler").isdisjoint({"harness", "envs", "rollout", "learner"})
    for part in HOST:
        assert reach(part) <= HOST, f"{part} is host code and reaches {reach(part) - HOST}"


LOAD = """
import importlib, json, sys
for module in json.load(sys.stdin):
    importlib.import_module(module)
    if loaded := sorted({"jax", "jaxlib", "flax", "optax", "orbax"} & set(sys.modules)):
        sys.exit(f"importing {module} loaded {', '.join(loaded)}")
print("none")
"""


@pytest.mark.stack
def test_importing_the_host_parts_loads_no_jax():
    host = [m for m in source_files() if any(within(m, f"harness_s_jax.{part}") for part in HOST)]
    host = [m for m in host if not m.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        input=json.dumps(["harness_s_jax", *host]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "none", done.stderr


def test_visible_top_level():
    # safe.directory: CI may run as another user than the one who cloned.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    visible = {name.partition("/")[0] for name in listed.stdout.split("\0") if name}
    visible = {name for name in visible if not name.startswith(".")}
    assert visible <= TOP_LEVEL, f"{visible - TOP_LEVEL} should lie inside one of {TOP_LEVEL}"


def test_files_are_short():
    too_long = []
    paths = (p for top in OURS for p in (ROOT / top).rglob("*"))
    for path in sorted(p for p in paths if p.suffix in {".py", ".sh", ".yaml"}):
        file = path.relative_to(ROOT)
        limit = MAX_LINES
        if file.parts[:2] == ("harness_s_jax", "model"):
            limit = MAX_LINES_MODEL
        elif file == Path("harness_s_jax/train.py"):
            limit = MAX_LINES_TRAIN
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit and "assets" not in file.parts:
            too_long.append(f"{file}: {lines} lines, {limit} at most: split it by what it does.")
    assert not too_long, "\n".join(too_long)
