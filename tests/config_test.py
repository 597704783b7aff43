"""A wrong configuration is refused in one sentence that says what to change."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_s_jax.config import ConfigError, check, check_key, differences, flatten, nearest

KEYS = st.text("abc", min_size=1, max_size=2)
VALUES = st.integers(0, 3) | st.text("xy", max_size=2) | st.lists(st.integers(0, 2), max_size=2)
CONFIGS = st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, min_size=1), max_size=4)

CONFIG = {
    "seed": 0,
    "evaluation": {"tasks": 100, "attempts": 3, "split": "test"},
    "limits": {"temperature": 1.0, "turn_tokens": 96},
    "rollout": {"concurrency": 4},
    "recipe": {"model": {"head_dim": 8}},
}


def changed(key: str, value: object) -> dict:
    group, name = key.split(".")
    return CONFIG | {group: CONFIG[group] | {name: value}}


def refusal(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_flatten_gives_dotted_keys_and_lists():
    assert flatten({"a": 1, "b": {"c": (1, 2), "d": {"e": None}}}) == {
        "a": 1, "b.c": [1, 2], "b.d.e": None,
    }  # fmt: skip


@given(CONFIGS, CONFIGS)
def test_differences_are_empty_only_between_equals_and_name_each_key(old: dict, new: dict):
    assert differences(old, old) == []
    lines = differences(old, new)
    assert [line.split(":")[0] for line in lines] == [
        line.split(":")[0] for line in differences(new, old)
    ]
    a, b = flatten(old), flatten(new)
    assert len(lines) == sum(a.get(k, "?") != b.get(k, "?") for k in {*a, *b})


def test_differences_say_what_was_and_what_is():
    new = changed("evaluation.tasks", 20) | {"extra": "x"}
    del new["seed"]
    assert differences(CONFIG, new) == [
        "evaluation.tasks: 100 -> 20",
        "extra: '(absent)' -> 'x'",
        "seed: 0 -> '(absent)'",
    ]


def test_a_good_configuration_passes_and_missing_keys_are_no_fault():
    assert check(CONFIG) is None
    assert check({}) is None
    assert check(changed("limits.temperature", 0)) is None
    assert check(changed("evaluation.tasks", 400)) is None


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("evaluation.tasks", "8", "got '8' for config.evaluation.tasks; it must be a whole number"),
        ("evaluation.tasks", True, "got True for config.evaluation.tasks; it must be a whole "),
        ("evaluation.tasks", 1.5, "got 1.5 for config.evaluation.tasks; it must be a whole "),
        ("evaluation.tasks", None, "got None for config.evaluation.tasks; it must be a whole "),
        ("evaluation.tasks", 0, "got 0 for config.evaluation.tasks; it must be between 1 and 400"),
        ("evaluation.tasks", 401, "got 401 for config.evaluation.tasks; it must be between 1 "),
        ("rollout.concurrency", 0, "got 0 for config.rollout.concurrency; it must be at least 1"),
        ("limits.temperature", "hot", "got 'hot' for config.limits.temperature; it must be a num"),
        ("limits.temperature", math.nan, "got nan for config.limits.temperature; it must be betw"),
        ("limits.temperature", math.inf, "got inf for config.limits.temperature; it must be betw"),
        ("limits.temperature", -0.1, "got -0.1 for config.limits.temperature; it must be between"),
        ("evaluation.split", "train", "got 'train' for config.evaluation.split; it must be one of"),
    ],
)
def test_a_wrong_value_is_refused_by_name(key: str, value: object, sentence: str):
    assert refusal(check, changed(key, value)).startswith(sentence)


def test_keys_that_exist_pass():
    for key in flatten(CONFIG):
        assert check_key(CONFIG, key) is None


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("evaluation.task", "did you mean config.evaluation.tasks?"),
        ("tasks", "did you mean config.evaluation.tasks?"),
        ("evalution.tasks", "did you mean config.evaluation.tasks?"),
        ("limits.seed", "did you mean config.seed?"),
        ("evaluation.xyz", "config.evaluation has tasks, attempts, split"),
        ("recipe.xyz", "config.recipe has model"),
        ("foo", "the configuration has seed, evaluation, limits, rollout, recipe"),
        ("foo.limits.xyz", "the configuration has seed, evaluation, limits, rollout, recipe"),
    ],
)
def test_an_unknown_key_gets_near_matches_or_what_there_is(key: str, hint: str):
    assert refusal(check_key, CONFIG, key) == (
        f"got a value for config.{key}; there is no such key; {hint}"
    )


def test_a_group_takes_no_value():
    assert refusal(check_key, CONFIG, "limits") == (
        "got a value for config.limits, which is a group; set one of its keys: "
        "config.limits.temperature, config.limits.turn_tokens"
    )


@given(st.text("abcdefghijklmnopqrstuvwxyz._", max_size=12))
def test_any_other_key_is_refused_in_a_sentence(key: str):
    if key in flatten(CONFIG):
        return
    text = refusal(check_key, CONFIG, key)
    assert re.match(rf"got a value for config\.{re.escape(key)}[;,] ", text)
    assert len(nearest(key, list(flatten(CONFIG)))) <= 3
