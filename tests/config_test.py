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
# A training configuration, apart: CONFIG's keys are what near matches are looked for among.
TRAINING = {
    "method": "harness_s",
    "limits": {"context_tokens": 256},
    "train": {
        "steps": 100, "tasks": 32, "task_pool": 4000, "group_size": 4, "validate_every": 10,
        "validation_tasks": 80, "validation_attempts": 1, "save_every": 10,
    },
    "anchor": {"stages": 4, "tasks": 40, "attempts": 1},
    "router": {"selector": "vote", "weight": "linear"},
    "mixture": {"unit": "within", "sibling_share": 0.5},
    "learner": {
        "row_tokens": 256,
        "micro_rows": 8,
        "hyper": {
            "learning_rate": 1e-3, "warmup_updates": 5, "weight_decay": 0.0, "max_grad_norm": 1.0,
            "clip_low": 0.2, "clip_high": 0.2, "std": "population", "eps": 1e-4,
            "aggregation": "token",
        },
    },
    "evaluation": {"validation_tasks": 100, "validation_attempts": 1, "h0_attempts": 12},
}  # fmt: skip


def changed(key: str, value: object, config: dict = CONFIG) -> dict:
    """`config` with another value of one key."""
    name, _, rest = key.partition(".")
    return config | {name: changed(rest, value, config.get(name, {})) if rest else value}


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


def test_a_good_training_configuration_passes_and_so_does_each_of_its_keys_alone():
    assert check(TRAINING) is None
    for key, value in flatten(TRAINING).items():
        assert check(changed(key, value, {})) is None


CHOICES = {
    "method": ["grpo", "h0_resample", "mix_siblings", "harness_s"],
    "router.selector": ["random", "rule", "vote"],
    "router.weight": ["linear", "harmonic", "reciprocal"],
    "mixture.unit": ["within", "between"],
    "learner.hyper.std": ["population", "sample", "none"],
    "learner.objective.aggregation": ["token", "attempt"],
    "evaluation.split": ["validation", "test"],
}


@pytest.mark.parametrize("key", CHOICES)
def test_each_choice_passes_and_nothing_else(key: str):
    for value in CHOICES[key]:
        assert check(changed(key, value, TRAINING)) is None
    for value in ("", "x", CHOICES[key][0].upper(), f"{CHOICES[key][0]} ", None, 0, True):
        assert refusal(check, changed(key, value, TRAINING)) == (
            f"got {value!r} for config.{key}; it must be one of {', '.join(CHOICES[key])}"
        )


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("train.steps", [1, 10**6], [0, -1]),
        ("train.tasks", [1, 4000], [0, 4001]),
        ("train.task_pool", [32, 4000], [0, 4001]),
        ("train.group_size", [2, 1000], [0, 1, 1001]),
        ("train.validate_every", [1, 10**6], [0]),
        ("train.validation_tasks", [1, 400], [0, 401]),
        ("train.validation_attempts", [1, 1000], [0, 1001]),
        ("train.save_every", [1, 10**6], [0]),
        ("anchor.tasks", [1, 400], [0, 401]),
        ("anchor.attempts", [1, 1000], [0, 1001]),
        ("mixture.sibling_share", [0, 0.0, 0.25, 1, 1.0], [-0.1, 1.1, math.nan]),
        ("learner.row_tokens", [256, 10**6], [0]),
        ("learner.micro_rows", [1, 10**6], [0]),
        ("learner.hyper.learning_rate", [0, 1e-6, 1.0], [-1e-3, 1.5, math.nan, math.inf]),
        ("learner.hyper.warmup_updates", [1, 10**6], [0, -1]),
        ("learner.hyper.weight_decay", [0.0, 1.0], [-0.1, 1.5, math.nan]),
        ("learner.hyper.max_grad_norm", [1e-6, 1, 1e9], [0, 0.0, -1.0, math.nan, math.inf]),
        ("learner.hyper.b2", [0.0, 0.99], [-0.1, 1.0, math.nan]),
        ("learner.hyper.adam_eps", [1e-8, 1.0], [0.0, 2.0]),
        ("learner.objective.clip_low", [0.0, 0.2, 1.0], [-0.1, 1.1, math.nan]),
        ("learner.objective.clip_high", [0.0, 0.28, 1e9], [-0.1, math.nan, math.inf]),
        ("learner.hyper.eps", [0.0, 1e-4, 1.0], [-1e-9, 1.5, math.nan]),
        ("evaluation.validation_tasks", [1, 400], [0, 401]),
        ("evaluation.validation_attempts", [1, 1000], [0, 1001]),
        ("evaluation.h0_attempts", [3, 1000], [2, 1001]),
    ],
)
def test_the_ranges_of_a_training_configuration(key: str, good: list, bad: list):
    config = changed("train.tasks", 1, TRAINING) if key == "train.task_pool" else TRAINING
    for value in good:
        assert check(changed(key, value, config)) is None
    for value in bad:
        text = refusal(check, changed(key, value, config))
        assert text.startswith(f"got {value} for config.{key}; it must be ")
    kind = "a whole number" if all(isinstance(v, int) for v in good) else "a number"
    for wrong in ("1", None, True):
        assert refusal(check, changed(key, wrong, config)) == (
            f"got {wrong!r} for config.{key}; it must be {kind}"
        )


@pytest.mark.parametrize(
    ("small", "large", "why"),
    [
        ("limits.context_tokens", "learner.row_tokens", "a row must hold a whole context"),
        ("train.tasks", "train.task_pool", "a step draws its tasks from the pool"),
    ],
)
def test_what_must_fit_into_what(small: str, large: str, why: str):
    def sizes(a: int, b: int) -> dict:
        return changed(large, b, changed(small, a, TRAINING))

    assert check(sizes(100, 100)) is None
    assert check(sizes(100, 101)) is None
    assert refusal(check, sizes(101, 100)) == (
        f"got 101 for config.{small} and 100 for config.{large}; {why}: lower the first or raise "
        f"the second"
    )
    assert check(changed(small, 4000, {})) is None  # without the other there is nothing to hold
    assert check(changed(large, 1, {})) is None
    assert "must be a whole number" in refusal(check, sizes("101", 100))  # the type comes first


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
