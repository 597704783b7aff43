"""Harness files: the pool we ship, the schema's refusals, hashes, round trips, the wordings."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_s_jax.harness import ops
from harness_s_jax.harness.directions import DIRECTIONS, direction_of, is_held_out
from harness_s_jax.harness.spec import (
    POOL,
    SCHEMA,
    HarnessSpec,
    from_dict,
    load,
    load_pool,
    save_pool,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
_WHEN = st.sampled_from(["1", "left <= 2", "error_has('a') or not turn == 1", "full_page"])
_TIMES = st.integers(1, 20)
OPERATIONS = st.one_of(
    st.builds(ops.Section, _TEXT),
    st.builds(ops.Remind, _WHEN, _TEXT, _TIMES, st.integers(0, 50)),
    st.builds(ops.Gate, _WHEN, _TEXT, _TIMES),
    st.builds(ops.FinishCheck, _WHEN, _TEXT, _TIMES),
)
SPECS = st.builds(
    HarnessSpec,
    st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,63}", fullmatch=True),
    st.none() | _TEXT,
    st.none() | _TEXT,
    st.just("") | _TEXT,
    _TEXT,
    st.lists(OPERATIONS, max_size=5).map(tuple),
    st.lists(_TEXT, max_size=20).map(tuple),
)


def content(**changes) -> dict:
    """A valid harness with some fields changed."""
    base = {
        "version": 1, "id": "one", "parent": "h0", "direction": None, "hypothesis": "",
        "system": "Solve.", "operations": [],
    }  # fmt: skip
    return base | changes


def remind(**changes) -> dict:
    return {"op": "remind", "when": "error", "text": "Look.", "max_times": 1} | changes


# --- the pool -------------------------------------------------------------------------------------


def test_the_pool_is_h0_and_twelve_siblings_of_one_direction_each():
    h0, siblings = load_pool()
    assert (h0.id, h0.parent, h0.direction, h0.operations) == ("h0", None, None, ())
    assert h0.prompt() == h0.system
    assert len(siblings) == 12
    assert [s.id for s in siblings] == sorted(s.id for s in siblings)
    assert len({s.hash for s in (h0, *siblings)}) == 13
    for sibling in siblings:
        assert sibling.parent == "h0"
        assert sibling.hypothesis
        assert len(sibling.operations) == 1
        assert direction_of(sibling.operations[0].text) == {sibling.direction}
    assert {s.direction for s in siblings} == set(DIRECTIONS)


def test_a_siblings_prompt_is_h0s_followed_by_its_sections():
    h0, siblings = load_pool()
    for sibling in siblings:
        sections = [o.text for o in sibling.operations if isinstance(o, ops.Section)]
        assert sibling.prompt() == " ".join([h0.system, *sections])


def test_the_pools_moments_are_those_of_their_directions():
    for sibling in load_pool()[1]:
        (operation,) = sibling.operations
        if not isinstance(operation, ops.Section):
            direction = DIRECTIONS[sibling.direction]
            assert operation == direction.at_the_moment(operation.text)


def test_files_are_named_after_their_ids(tmp_path):
    assert {load(path).id for path in POOL.glob("*.yaml")} == {p.stem for p in POOL.glob("*.yaml")}
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump(content(id="one")))
    with pytest.raises(ValueError, match=r"two\.yaml: got id 'one'; .* named after its id"):
        load(file)


def test_a_pool_needs_h0_and_its_system_text(tmp_path):
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(content(system="Solve it.")))
    with pytest.raises(ValueError, match=r"got no h0\.yaml"):
        load_pool(tmp_path)
    (tmp_path / "h0.yaml").write_text(yaml.safe_dump(content(id="h0", parent=None)))
    with pytest.raises(ValueError, match="harness one: its system text is not H0's; use a section"):
        load_pool(tmp_path)
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(content()))
    h0, (one,) = load_pool(tmp_path)
    assert (h0.id, one.id) == ("h0", "one")
    assert h0.hash == one.hash


def test_a_file_that_is_no_yaml_is_a_value_error(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text("id: [unclosed")
    with pytest.raises(ValueError, match=r"one\.yaml"):
        load(file)


# --- the schema -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"version": 2}, "at version:"),
        ({"version": True}, "at version:"),
        ({"id": "H0"}, "at id:"),
        ({"id": ""}, "at id:"),
        ({"id": "../h0"}, "at id:"),
        ({"id": "a" * 65}, "at id:"),
        ({"parent": 1}, "at parent:"),
        ({"direction": []}, "at direction:"),
        ({"hypothesis": "x" * 401}, "at hypothesis:"),
        ({"evidence": "x"}, "at evidence:"),
        ({"evidence": [1]}, "at evidence/0:"),
        ({"evidence": ["x"] * 21}, "at evidence:"),
        ({"system": ""}, "at system:"),
        ({"tools": []}, "at the top:"),
        ({"operations": [{"op": "section", "text": "x"}] * 13}, "at operations:"),
        ({"operations": {}}, "at operations:"),
        ({"operations": [{"op": "section", "text": "x"}, "remind"]}, "at operations/1"),
        ({"operations": [{"op": "act", "text": "x"}]}, "at operations/0"),
        ({"operations": [remind(max_times=0)]}, "at operations/0"),
        ({"operations": [remind(max_times="1")]}, "at operations/0"),
        ({"operations": [remind(text="x" * 401)]}, "at operations/0"),
        ({"operations": [remind(cooldown=-1)]}, "at operations/0/cooldown:"),
        ({"operations": [remind(call="execute")]}, "at operations/0"),
        ({"operations": [remind(op="gate", cooldown=1)]}, "at operations/0"),
        ({"operations": [remind(when="turn.real")]}, "at operations/0/when: got 'turn.real'"),
        ({"operations": [remind(), remind(when="x =")]}, "at operations/1/when: got the condition"),
    ],
)
def test_a_refusal_names_the_harness_and_the_place(changes, place):
    name = changes.get("id", "one")
    with pytest.raises(ValueError, match=re.escape(f"harness {name}: {place}")):
        from_dict(content(**changes))


@pytest.mark.parametrize(
    ("field", "wrong"), [("max_times", 0), ("max_times", "1"), ("text", "x" * 401), ("when", 1)]
)
def test_a_refusal_names_the_field_of_an_operation(field, wrong):
    with pytest.raises(ValueError, match=f"at operations/0/{field}:"):
        from_dict(content(operations=[remind(**{field: wrong})]))


@pytest.mark.parametrize("key", SCHEMA["required"])
def test_every_field_is_required(key):
    with pytest.raises(ValueError, match=f"at the top: '{key}' is a required property"):
        from_dict({k: v for k, v in content().items() if k != key})


@pytest.mark.parametrize("wrong", [None, [], "h0", 3])
def test_what_is_no_mapping_is_refused(wrong):
    with pytest.raises(ValueError, match="harness None: at the top:"):
        from_dict(wrong)


def test_an_id_does_not_end_in_a_newline():
    with pytest.raises(ValueError, match="at id:"):
        from_dict(content(id="one\n"))


# --- hashes and round trips -----------------------------------------------------------------------


@given(SPECS)
def test_a_spec_comes_back_from_its_dict_through_json_and_yaml(spec):
    assert from_dict(spec.to_dict()) == spec
    assert from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    again = from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict())))
    assert again == spec
    assert again.hash == spec.hash


@given(SPECS, st.randoms(use_true_random=False))
def test_the_hash_does_not_depend_on_the_order_of_keys(spec, random):
    def shuffled(mapping: dict) -> dict:
        return dict(random.sample(sorted(mapping.items()), len(mapping)))

    mixed = shuffled(spec.to_dict())
    mixed["operations"] = [shuffled(op) for op in mixed["operations"]]
    assert from_dict(mixed).hash == spec.hash


@given(SPECS, SPECS)
def test_the_hash_is_of_what_the_policy_can_be_shown_and_nothing_else(one, two):
    same = (one.system, one.operations) == (two.system, two.operations)
    assert (one.hash == two.hash) == same
    renamed = HarnessSpec(two.id, two.parent, two.direction, two.hypothesis, one.system,
                          one.operations)  # fmt: skip
    assert renamed.hash == one.hash


def test_the_hash_sees_every_field_and_the_order_of_operations():
    first, second = remind(), remind(when="turn == 1")
    variants = [
        [], [first], [second], [first, second], [second, first], [first, first],
        [remind(text="Look!")], [remind(max_times=2)], [remind(cooldown=1)],
        [remind(op="gate")], [remind(op="finish_check")], [{"op": "section", "text": "Look."}],
    ]  # fmt: skip
    hashes = [from_dict(content(operations=operations)).hash for operations in variants]
    assert len(set(hashes)) == len(variants)
    assert from_dict(content(operations=[remind(cooldown=0)])).hash == hashes[1]
    assert from_dict(content(system="Solve. Look.")).hash != hashes[-1]


def test_the_hash_of_h0_is_fixed():
    h0 = HarnessSpec("h0", None, None, "", "Solve the task by programs, one a turn.")
    assert h0.hash == load_pool()[0].hash == "2e4ae47bdc7d80d1"


def test_card_and_operation_names():
    spec = from_dict(content(direction="docs", hypothesis="why", operations=[remind()] * 2))
    card = spec.card()
    assert (card.id, card.hash, card.parent, card.direction, card.summary) == (
        "one", spec.hash, "h0", "docs", "why",
    )  # fmt: skip
    assert spec.operation_name(1) == "remind.1"


# --- a pool on disk -------------------------------------------------------------------------------

H0 = load_pool()[0]
_SIBLINGS = st.dictionaries(
    st.from_regex(r"s[a-z0-9_.-]{0,20}", fullmatch=True),
    SPECS.filter(lambda spec: r"\x85" not in repr(spec)),  # see below
    max_size=2,
)


@settings(deadline=None, max_examples=25)
@given(_SIBLINGS)
def test_a_saved_pool_loads_as_it_was(tmp_path_factory, specs):
    siblings = [
        replace(spec, id=name, parent="h0", system=H0.system)
        for name, spec in sorted(specs.items())
    ]
    directory = tmp_path_factory.mktemp("kept") / "deep" / "pool"
    save_pool(directory, [H0, *siblings])
    h0, found = load_pool(directory)
    assert h0 == H0
    assert sorted(found, key=lambda s: s.id) == siblings
    assert [f.name for f in directory.parent.iterdir()] == ["pool"]


@pytest.mark.parametrize(
    "text", ["a\x85b", "a\u2028b", "a\r\nb\r", " a\t\n", "\ufeffé 日本 😀", "- #: 'x"]
)
def test_a_saved_pool_keeps_every_character(tmp_path, text):
    spec = HarnessSpec("s", "h0", None, text, H0.system, (ops.Section(text),), (text,))
    save_pool(tmp_path / "pool", [H0, spec])
    assert load_pool(tmp_path / "pool") == (H0, (spec,))


def test_the_shipped_pool_comes_back_with_its_hashes(tmp_path):
    h0, siblings = load_pool()
    save_pool(tmp_path / "pool", [h0, *siblings])
    assert load_pool(tmp_path / "pool") == (h0, siblings)
    assert {f.name for f in (tmp_path / "pool").iterdir()} == {f.name for f in POOL.glob("*.yaml")}
    assert max(len(f.read_text().splitlines()) for f in (tmp_path / "pool").iterdir()) > 5


def test_a_saved_pool_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    h0, siblings = load_pool()
    with monkeypatch.context() as patch:
        dump, calls = yaml.safe_dump, itertools.count()

        def full(*given, **options) -> str:
            if next(calls) == 3:
                raise OSError("the disk is full")
            return dump(*given, **options)

        patch.setattr(yaml, "safe_dump", full)
        with pytest.raises(OSError, match="full"):
            save_pool(tmp_path / "pool", [h0, *siblings])
    assert not (tmp_path / "pool").exists()
    assert [f.name for f in tmp_path.iterdir()] == ["pool.part"]
    (tmp_path / "pool.part" / "stale.yaml").write_text("of another run")
    save_pool(tmp_path / "pool", [h0, siblings[0]])
    assert [f.name for f in tmp_path.iterdir()] == ["pool"]
    assert load_pool(tmp_path / "pool") == (h0, siblings[:1])


def test_a_pool_that_is_there_is_not_written_over(tmp_path):
    h0, siblings = load_pool()
    save_pool(tmp_path / "pool", [h0, siblings[0]])
    with pytest.raises(OSError, match="pool"):
        save_pool(tmp_path / "pool", [h0, siblings[1]])
    assert load_pool(tmp_path / "pool") == (h0, siblings[:1])


# --- directions -----------------------------------------------------------------------------------


def test_every_wording_belongs_to_exactly_one_direction():
    sentences = [s for d in DIRECTIONS.values() for s in d.sentences()]
    assert len(sentences) == len(set(sentences))
    assert len({s.lower() for s in sentences}) == len(sentences)
    for name, direction in DIRECTIONS.items():
        assert direction.name == name
        for sentence in direction.sentences():
            assert direction_of(sentence) == {name}
            assert direction_of(f"Solve. {sentence} ok\n{sentence}") == {name}


def test_a_fifth_of_the_wordings_is_held_out_in_every_direction():
    kept, shown = [], []
    for direction in DIRECTIONS.values():
        kept += direction.wordings(held_out=True)
        shown += direction.wordings(held_out=False)
        assert len(direction.wordings(held_out=True)) >= 2
        assert len(direction.wordings(held_out=False)) >= 10
    assert not set(kept) & set(shown)
    assert len(kept) + len(shown) == sum(len(d.sentences()) for d in DIRECTIONS.values())
    assert 0.1 < len(kept) / (len(kept) + len(shown)) < 0.3
    assert all(map(is_held_out, kept))


def test_held_out_wordings_are_never_in_the_pool():
    held_out = {s for d in DIRECTIONS.values() for s in d.wordings(held_out=True)}
    for spec in load_pool()[1]:
        texts = [operation.text for operation in spec.operations]
        assert not [s for s in held_out for text in texts if s in text]


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=list(DIRECTIONS))
def test_every_moment_makes_a_valid_harness(direction):
    text = direction.sentences()[0]
    operations = (direction.section(text), direction.at_the_moment(text))
    spec = HarnessSpec("one", "h0", direction.name, "", "Solve.", operations)
    assert from_dict(spec.to_dict()) == spec
    assert operations[1].text == text


def test_direction_of_finds_several_and_none():
    texts = [d.sentences()[0] for d in DIRECTIONS.values()]
    assert direction_of(" ".join(texts)) == set(DIRECTIONS)
    assert direction_of("ok") == set()
