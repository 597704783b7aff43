"""The warm start: a tiny policy that acts in the embedded world and follows reminders.

Tokenizer and policy are made from nothing by one command: scripted demonstrations run through the
one agent loop under random harnesses, then supervised updates on the tokens the script "sampled".
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from harness_s_jax import batch as batching
from harness_s_jax import metrics
from harness_s_jax.analysis.records import behaviour_rates, record_of
from harness_s_jax.config import ConfigError
from harness_s_jax.envs.miniworld import world as miniworld
from harness_s_jax.envs.miniworld.apps import APIS
from harness_s_jax.envs.miniworld.families import BEHAVIOURS, FAMILIES, VOCABULARY
from harness_s_jax.harness.directions import DIRECTIONS
from harness_s_jax.harness.loop import Limits
from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.learner import supervised
from harness_s_jax.learner.checkpoint import checkpoints
from harness_s_jax.model import qwen3_5
from harness_s_jax.model.config import Qwen35Config
from harness_s_jax.model.policy import policy_directory, save_policy
from harness_s_jax.model.template import ChatTemplate, embedded_template
from harness_s_jax.model.tokenizer import SentencePieceTokenizer, train_sentencepiece
from harness_s_jax.rollout.attempt import Setting, run_attempt
from harness_s_jax.rollout.scripted import Rates, ScriptedPolicy
from harness_s_jax.rows import PackedRows
from harness_s_jax.toolcalls import render_call
from harness_s_jax.types import AttemptKey, ToolCall, Trajectory

REPORT_FILE = "warmstart.json"


# --- tokenizer ------------------------------------------------------------------------------------


def code_pieces() -> list[str]:
    """Fragments of programs that are one id each, cut where composition must survive."""
    opening, closing = render_call(ToolCall("execute", {"code": "CODE"})).split("CODE")
    apis = {f".{api}(" for calls in APIS.values() for api in calls}
    names = {"ver", *(p for calls in APIS.values() for a in calls.values() for p in a.parameters)}
    arguments = {f"{name}{quote}" for name in names for quote in ("=", "='")}
    return [
        opening, closing, "apis.", *sorted(apis), *sorted(arguments),
        "['", "', '", "']", "', ", ", ", "')", "=0)", "range(1, 9)", "for p in ", " += ", " = ",
        "=p)", "print(", "len(", "sum(", "set(", "[s for s in ", " if s in ", " or s in ", " + ",
        "Error: ", "[0]", " turns)", " (",
    ]  # fmt: skip


# Sentences of the world that no gold program meets.
ERRORS = (
    "Error: missing or wrong argument ver", "Error: wrong password", "Error: no tool call",
    "Error: not logged in to music", "NameError: name is not defined",
    "SyntaxError: invalid syntax",
    "Error: the tool call was not finished",
)  # fmt: skip


def make_tokenizer(config: Any) -> SentencePieceTokenizer:
    """Trains the tokenizer on gold programs, instructions, docs and every wording."""
    texts = [config.system, *(s for d in DIRECTIONS.values() for s in d.sentences())]
    texts += [" ".join(words) for words in VOCABULARY]
    texts += [f"'{word}'" for words in VOCABULARY for word in words]
    texts += [api.doc for calls in APIS.values() for api in calls.values()]
    texts += [config.system, *ERRORS] * config.tokenizer_seeds
    for name in FAMILIES:
        for seed in range(config.tokenizer_seeds):
            instance = miniworld.build(name, seed)
            programs, seen = miniworld.run_gold(name, instance)
            texts += [instance.instruction, *programs, *seen]
    model = train_sentencepiece(
        texts, code_pieces(), vocab_size=config.vocab_size, leading_space=True
    )
    return SentencePieceTokenizer(model)


# --- demonstrations -------------------------------------------------------------------------------


def random_harness(rng: random.Random, needs: frozenset[str], config: Any) -> HarnessSpec:
    """H0, or H0 with one to three operations in directions that tend to fit the task."""
    if rng.random() < config.plain_share:
        return HarnessSpec("h0", None, None, "", config.system)
    count = rng.choice([1, 1, 1, 2, 2, 3])
    names = sorted(needs & set(DIRECTIONS)) if rng.random() < config.fitting_share else []
    names = rng.sample(names, min(len(names), count))
    others = [d for d in DIRECTIONS if d not in names]
    names += rng.sample(others, count - len(names))
    operations = []
    for name in names:
        direction = DIRECTIONS[name]
        text = rng.choice(direction.wordings(held_out=False))
        form = direction.section if rng.random() < 0.5 else direction.at_the_moment
        operations.append(form(text))
    rng.shuffle(operations)
    return HarnessSpec("demonstration", "h0", None, "", config.system, tuple(operations))


async def demonstrations(config: Any, template: ChatTemplate) -> list[Trajectory]:
    """Scripted attempts at warm-start tasks, each under its own random harness."""
    environment = miniworld.MiniWorldEnvironment()
    tasks = environment.tasks("warmstart", config.demonstration_tasks)
    rates = Rates(**config.rates)
    limits = Limits(config.row_tokens, config.row_tokens)
    made = []
    for number in range(config.demonstrations):
        task = tasks[number % len(tasks)]
        key = AttemptKey(config.seed, "warmstart", 0, task.id, number // len(tasks))
        rng = random.Random(str(key))
        spec = random_harness(rng, task.needs, config)
        instance = miniworld.build(task.family, task.payload["seed"])
        policy = ScriptedPolicy(task, instance, template, template.stop_ids[0], rates, rng)
        setting = Setting(environment, policy, template, limits, infra_retries=0, deadline_s=60.0)
        made.append(await run_attempt(spec, task, key, setting))
    return made


# --- training -------------------------------------------------------------------------------------


def batches(trajectories: list[Trajectory], config: Any, steps: int) -> Iterator[PackedRows]:
    """Shuffled epochs of packed rows; every demonstration of an epoch is used, short or long."""
    segments = [s for t in trajectories for s in t.segments]
    rows: list[list[int]] = []
    for epoch in itertools.count():
        order = np.random.default_rng([config.seed, epoch]).permutation(len(segments))
        for start in range(0, len(order), 64 * config.batch_rows):
            chosen = order[start : start + 64 * config.batch_rows]
            packed = batching.pack_rows([segments[i] for i in chosen], config.row_tokens)
            shuffle = np.random.default_rng([config.seed, epoch, start]).permutation(len(packed))
            rows += [[int(chosen[i]) for i in packed[r]] for r in shuffle]
            while len(rows) >= config.batch_rows:
                now, rows = rows[: config.batch_rows], rows[config.batch_rows :]
                yield batching.lay_out(
                    segments, range(len(segments)), now, config.row_tokens, config.batch_rows
                )
                steps -= 1
                if steps == 0:
                    return


def train(
    config: Any,
    model_config: Qwen35Config,
    trajectories: list[Trajectory],
    directory: Path,
    say: Callable[[str], None],
) -> tuple[Any, list[float]]:
    """Supervised updates from a fresh initialisation, or from the checkpoints in `directory`.

    Returns parameters and the loss of every update.
    """
    decay = max(config.steps, config.warmup_steps + 1)  # a short try may end in its warm-up
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, decay, config.learning_rate * 0.02
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.01)
    )
    params = qwen3_5.init_params(model_config, jax.random.key(config.seed))
    state, losses = (params, optimizer.init(params)), []
    with checkpoints(directory) as saved:
        if (found := saved.latest(state)) is not None:
            _, state, host = found
            losses = host["losses"]
            say(f"warmstart: goes on after step {len(losses)}")
        first = len(losses)
        started = time.monotonic()
        todo = itertools.islice(batches(trajectories, config, config.steps), first, None)
        for number, batch in enumerate(todo, first + 1):
            *state, loss = supervised.step(*state, batch, config=model_config, optimizer=optimizer)
            losses.append(float(loss))
            if number % config.log_every == 0 or number == config.steps:
                per_step = (time.monotonic() - started) / (number - first)
                say(
                    f"warmstart {number}/{config.steps}  "
                    f"loss {np.mean(losses[-config.log_every :]):.4f}  "
                    f"{per_step:.2f} s/step  {per_step * (config.steps - number):.0f} s left"
                )
            if number % config.save_every == 0:
                saved.save(number, tuple(state), {"losses": losses})
    return state[0], losses


def run(config: Any, directory: Path, saved: Path, say: Callable[[str], None]) -> None:
    """The whole warm start: writes a policy that `load_policy` reads, and warmstart.json.

    Interrupted, it goes on from its last checkpoint in `saved`.
    """
    started = time.monotonic()
    tokenizer = make_tokenizer(config)
    template = embedded_template(tokenizer)
    trajectories = asyncio.run(demonstrations(config, template))
    lengths = [t.context_tokens for t in trajectories]
    say(
        f"warmstart: vocabulary {tokenizer.vocab_size}; {len(trajectories)} demonstrations in "
        f"{time.monotonic() - started:.0f} s, {np.mean(lengths):.0f} tokens on average, "
        f"{max(lengths)} at most, {np.mean([t.reward for t in trajectories]):.3f} solved"
    )
    model_config = Qwen35Config.from_hf(
        {**config.model.to_dict(), "vocab_size": tokenizer.vocab_size}
    )
    params, losses = train(config, model_config, trajectories, saved, say)
    save_policy(directory, model_config, params, tokenizer)
    plain = [record_of(t) for t in trajectories if t.harness_id == "h0"]
    report = {
        "config": config.to_dict(),
        "seconds": round(time.monotonic() - started, 1),
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "vocabulary": tokenizer.vocab_size,
        "tokens_mean": float(np.mean(lengths)),
        "tokens_max": int(max(lengths)),
        "final_loss": float(np.mean(losses[-20:])),
        "demonstrated_rates_without_reminders": behaviour_rates(plain, BEHAVIOURS),
    }
    (directory / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n")


def rates_line(report: dict[str, Any]) -> str:
    """How often the demonstrations under H0 show each behaviour where the task needs it."""
    shown = report["demonstrated_rates_without_reminders"]
    return ", ".join(
        f"{name} {100 * rates['needed']:.1f}%" for name, rates in shown.items() if "needed" in rates
    )


def make(config: Any, workdir: Path, say: Callable[[str], None]) -> None:
    """Stage: makes the policy in the workdir, unless it is there already."""
    with metrics.stage(workdir, "warmstart"):
        if not (workdir / "policy").exists():
            part = workdir / "policy.part"
            run(config.warmstart, part, workdir / "checkpoints" / "warmstart", say)
            part.rename(workdir / "policy")
        use(config, workdir, say)


def use(config: Any, workdir: Path, say: Callable[[str], None]) -> None:
    """Stage: says which warm-started policy the run uses."""
    directory = policy_directory(workdir, config.policy.checkpoint)
    try:
        report = json.loads((directory / REPORT_FILE).read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise ConfigError(f"no warm-started policy in {directory}: {e}") from None
    say(
        f"warmstart: policy {directory}, {report['parameters']} parameters, "
        f"vocabulary {report['vocabulary']}, made in {report['seconds']:.0f} s"
    )
    say(f"warmstart: shown without reminders where needed, demonstrations: {rates_line(report)}")
