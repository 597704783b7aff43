"""A harness as data: versioned YAML, checked against a schema, frozen, hashed.

H0 is a system prompt and no operations. A sibling adds operations to its parent's, in one
direction; the environment interface is H0's by construction, since a spec cannot name another.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from jsonschema.exceptions import best_match

from harness_s_jax.harness import predicates
from harness_s_jax.harness.ops import KINDS, Operation, Section
from harness_s_jax.types import HarnessCard

VERSION = 1
POOL = Path(__file__).parent / "pool"
_TEXT = {"type": "string", "minLength": 1, "maxLength": 400}
_TIMES = {"type": "integer", "minimum": 1, "maximum": 20}
_CONDITIONAL = {"when": {"type": "string"}, "text": _TEXT, "max_times": _TIMES}


def _operation(
    kind: str, properties: Mapping[str, Any], optional: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"op": {"const": kind}, **properties, **optional},
        "required": ["op", *properties],
        "additionalProperties": False,
    }


OPERATION_SCHEMAS = {
    "section": _operation("section", {"text": _TEXT}, {}),
    "remind": _operation("remind", _CONDITIONAL, {"cooldown": {"type": "integer", "minimum": 0}}),
    "gate": _operation("gate", _CONDITIONAL, {}),
    "finish_check": _operation("finish_check", _CONDITIONAL, {}),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "version": {"const": VERSION},
        "id": {"type": "string", "pattern": r"^[a-z0-9][a-z0-9_.-]{0,63}\Z"},
        "parent": {"type": ["string", "null"]},
        "direction": {"type": ["string", "null"]},
        "hypothesis": {"type": "string", "maxLength": 400},
        "evidence": {"type": "array", "maxItems": 20, "items": {"type": "string"}},
        "system": _TEXT,
        "operations": {
            "type": "array",
            "maxItems": 12,
            "items": {
                "type": "object",
                "properties": {"op": {"enum": list(KINDS)}},
                "required": ["op"],
            },
        },
    },
    "required": ["version", "id", "parent", "direction", "hypothesis", "system", "operations"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class HarnessSpec:
    """One harness. Equal `hash`, equal behaviour: names and reasons are not part of it."""

    id: str
    parent: str | None
    direction: str | None
    hypothesis: str
    system: str
    operations: tuple[Operation, ...] = ()
    evidence: tuple[str, ...] = ()  # failed train attempts that speak for it, some of them

    @property
    def hash(self) -> str:
        """sha256 over canonical JSON of what the policy can be shown."""
        content = {"system": self.system, "operations": [_as_dict(op) for op in self.operations]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def prompt(self) -> str:
        """The system prompt: H0's text, then the sections."""
        return " ".join([self.system, *(o.text for o in self.operations if isinstance(o, Section))])

    def operation_name(self, position: int) -> str:
        """How a trajectory names an operation that fired."""
        return f"{_kind(self.operations[position])}.{position}"

    def card(self) -> HarnessCard:
        return HarnessCard(self.id, self.hash, self.parent, self.direction, self.hypothesis)

    def to_dict(self) -> dict[str, Any]:
        """The YAML content; `from_dict` gives the same spec back."""
        operations = [_as_dict(op) for op in self.operations]
        fields = asdict(self) | {"operations": operations, "evidence": list(self.evidence)}
        return {"version": VERSION, **fields}


def from_dict(content: Mapping[str, Any]) -> HarnessSpec:
    """Checks and freezes a spec.

    Raises:
      ValueError: the content does not fit the schema, or a condition does not parse; the message
        names the place.
    """
    name = content.get("id") if isinstance(content, Mapping) else None
    _check(name, content, SCHEMA, "")
    operations = []
    for i, item in enumerate(content["operations"]):
        _check(name, item, OPERATION_SCHEMAS[item["op"]], f"operations/{i}/")
        operation = KINDS[item["op"]](**{k: v for k, v in item.items() if k != "op"})
        if not isinstance(operation, Section):
            try:
                predicates.parse(operation.when)
            except ValueError as e:
                raise ValueError(f"harness {name}: at operations/{i}/when: {e}") from None
        operations.append(operation)
    return HarnessSpec(
        id=content["id"],
        parent=content["parent"],
        direction=content["direction"],
        hypothesis=content["hypothesis"],
        system=content["system"],
        operations=tuple(operations),
        evidence=tuple(content.get("evidence", ())),
    )


def _check(name: Any, content: Any, schema: Mapping[str, Any], where: str) -> None:
    worst = best_match(jsonschema.Draft202012Validator(schema).iter_errors(content))
    if worst is not None:
        place = where + "/".join(str(p) for p in worst.absolute_path)
        raise ValueError(f"harness {name}: at {place.rstrip('/') or 'the top'}: {worst.message}")


def load(path: Path) -> HarnessSpec:
    """Reads one YAML file; the file is named after the id. Raises ValueError, OSError."""
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as e:
        raise ValueError(f"{path}: not YAML: {e}") from None
    spec = from_dict(content)
    if spec.id != path.stem:
        raise ValueError(f"{path}: got id {spec.id!r}; a harness file is named after its id")
    return spec


def load_pool(directory: Path = POOL) -> tuple[HarnessSpec, tuple[HarnessSpec, ...]]:
    """H0 and its siblings, siblings in order of id.

    Raises:
      ValueError: there is no h0.yaml, a file is wrong, or a sibling's system text is not H0's.
    """
    specs = {s.id: s for s in (load(p) for p in sorted(directory.glob("*.yaml")))}
    if "h0" not in specs:
        raise ValueError(f"got no h0.yaml in {directory}; a pool needs its base harness")
    h0 = specs.pop("h0")
    if h0.operations or h0.parent:
        raise ValueError("harness h0: the base harness has no parent and no operations")
    for spec in specs.values():
        if spec.parent != "h0" and spec.parent not in specs:
            raise ValueError(f"harness {spec.id}: its parent {spec.parent!r} is not in the pool")
        if spec.system != h0.system:
            raise ValueError(f"harness {spec.id}: its system text is not H0's; use a section")
    return h0, tuple(specs.values())


def save_pool(directory: Path, specs: Sequence[HarnessSpec]) -> None:
    """Writes what `load_pool` reads; `directory` is there whole or not at all."""
    part = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed run
    part.mkdir(parents=True)
    for spec in specs:
        text = yaml.safe_dump(spec.to_dict(), sort_keys=False, width=100)
        (part / f"{spec.id}.yaml").write_text(text)
    part.rename(directory)


def _kind(operation: Operation) -> str:
    return next(kind for kind, cls in KINDS.items() if type(operation) is cls)


def _as_dict(operation: Operation) -> dict[str, Any]:
    return {"op": _kind(operation), **asdict(operation)}
