"""The command line that every experiment shares: flags, workdir, stages."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from harness_s_jax import config as configs
from harness_s_jax.hosts import HostError, Hosts, join

Say = Callable[[str], None]
Stage = Callable[[Any, Path, Say], None]
# What this version has of the environments.
ENVIRONMENTS = ("miniworld",)
STAGE_S = 7 * 86400.0  # what the first host may take for a stage that the others wait for


class Refusal(Exception):
    """Something the user has to change; the message is the sentence to print."""


def say(line: str) -> None:
    """Prints a line at once, so that a pipe or a log file shows progress."""
    print(line, flush=True)


def main(file: str, stages: Mapping[str, Stage], choose: Callable[[], tuple[str, str]]) -> None:
    """Runs an experiment; `file` is its own path, `stages` what it can run, in order.

    `choose` names the variant to run when no --config is given, and says why. Exits with 0, with 2
    after a sentence on what to change, or with 130 when interrupted.
    """
    path = os.path.relpath(file)
    try:
        config, workdir, chosen = _read_flags(path, list(stages), choose)
        hosts = Hosts("stages", STAGE_S)
        if hosts.first:
            _prepare(config, workdir)
        with _alone(workdir) if hosts.first else contextlib.nullcontext():
            hosts.share("prepared")
            for name in chosen:
                started = time.monotonic()
                # Training is a job of all hosts; the other stages are the first one's.
                if hosts.first or name == "train":
                    stages[name](config, workdir, say if hosts.first else _silent)
                hosts.share(name)
                if hosts.first:
                    say(f"{name}: {time.monotonic() - started:.1f} s")
    except (Refusal, configs.ConfigError, HostError) as e:
        print(f"{Path(path).stem}: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        sys.exit(130)


@contextlib.contextmanager
def _alone(workdir: Path) -> Iterator[None]:
    """Keeps other processes out of the workdir: two would write the same attempts twice."""
    with (workdir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(
                f"{workdir} is in use by another process; wait for it or give another --workdir"
            ) from None
        yield


def _silent(line: str) -> None:
    """What hosts but the first say."""


def choose_variant() -> tuple[str, str]:
    """The variant that runs on this machine when none is named, and the reason in a few words."""
    missing = missing_for_paper("")
    return ("debug", f"{'; '.join(missing)}") if missing else ("paper", "an accelerator is present")


def missing_for_paper(checkpoint: str) -> list[str]:
    """What the `paper` variant lacks here, each with what to do about it."""
    import jax

    missing = []
    if jax.default_backend() == "cpu":
        missing.append("no accelerator (jax sees only the CPU)")
    if not checkpoint:
        missing.append("no weights (--config.policy.checkpoint=DIRECTORY of Qwen3.5-4B)")
    elif not (Path(checkpoint) / "config.json").exists():
        missing.append(f"no config.json in --config.policy.checkpoint={checkpoint}")
    return missing


def _read_flags(
    path: str, stages: list[str], choose: Callable[[], tuple[str, str]]
) -> tuple[ConfigDict, Path, list[str]]:
    name = Path(path).stem
    given, arguments = _take_config(sys.argv[1:])
    if {"--help", "-help", "-h"} & set(arguments):
        say(_help(name, stages, _load(given or path)))
        sys.exit(0)
    join("--distributed" in arguments)  # before anything else of jax
    variant, reason = ("", "") if given else choose()
    config = _load(given or f"{path}:{variant}")
    workdir, chosen = _parse(arguments, config, stages)
    configs.check(config.to_dict())
    if config.variant == "paper":
        missing = missing_for_paper(config.policy.checkpoint)
        missing.append("no AppWorld (the environment is not in this version; only miniworld is)")
        raise Refusal(
            f"the variant paper cannot run here: {'; '.join(missing)}; "
            f"--config={path}:debug runs on any machine"
        )
    if config.environment not in ENVIRONMENTS:
        raise Refusal(
            f"got {config.environment!r} for config.environment; this version has only "
            f"{', '.join(ENVIRONMENTS)}"
        )
    if not given:
        say(f"{name}: running the variant {variant}: {reason}")
    return config, Path(workdir or f"runs/{name}-{config.variant}"), chosen


def _take_config(arguments: list[str]) -> tuple[str, list[str]]:
    """The last value of --config ("" without one), and the other arguments."""
    given, rest = "", []
    todo = iter(arguments)
    for argument in todo:
        flag, equals, value = argument.partition("=")
        if flag not in ("--config", "-config"):
            rest.append(argument)
            continue
        given = value if equals else next(todo, "")
        if not given or given.startswith("-"):
            raise Refusal("got --config without a value; it takes FILE.py:VARIANT")
    return given, rest


def _load(given: str) -> ConfigDict:
    """What `get_config` of FILE.py, or of FILE.py:VARIANT, returns."""
    file, _, variant = given.partition(":")
    if not Path(file).is_file() or not file.endswith(".py"):
        what = "that is no Python file" if Path(file).exists() else f"there is no file {file}"
        raise Refusal(
            f"got --config={given}; {what} (seen from {Path.cwd()}); "
            f"give FILE.py:VARIANT, as experiments/appworld_4b.py:debug"
        )
    spec = importlib.util.spec_from_file_location(f"config_{Path(file).stem}", file)
    assert spec is not None  # for a name in .py there is a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(*([variant] if variant else []))
    except Exception as e:  # whatever that file does wrong
        what = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise Refusal(f"got --config={given}; it does not load: {what}") from None
    if not isinstance(config, ConfigDict) or not {"variant", "environment"} <= set(config):
        raise Refusal(
            f"got --config={given}; its get_config must return a ConfigDict with the keys variant "
            f"and environment, as in experiments/appworld_4b.py"
        )
    return config


def _parse(arguments: list[str], config: ConfigDict, stages: list[str]) -> tuple[str, list[str]]:
    """Puts the overrides into `config`; returns the workdir ("" without one) and the stages."""
    for argument in arguments:
        if override := re.match(r"--?(?:no)?config\.([^=]*)", argument):
            configs.check_key(config.to_dict(), override[1])
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_list("stages", stages, "", flag_values=values)
    flags.DEFINE_bool("distributed", False, "", flag_values=values)
    try:
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=values, lock_config=True, sys_argv=arguments
        )
        rest = values(["", *arguments])
    except flags.UnrecognizedFlagError as e:
        keys = [f"config.{key}" for key in configs.flatten(config.to_dict())]
        near = configs.nearest(e.flagname, [*_FLAGS, *keys])
        hint = f"did you mean --{' or --'.join(near)}?" if near else "--help lists the flags"
        raise Refusal(f"got --{e.flagname}; there is no such flag; {hint}") from None
    except flags.IllegalFlagValueError as e:
        raise Refusal(_wrong_value(str(e), config)) from None
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
        line = (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip(".")
        raise Refusal(f"{line}; --help lists the flags") from None
    if len(rest) > 1:
        raise Refusal(f"got the argument {rest[1]!r}; every setting is a flag: --name=value")
    if values.workdir == "":
        raise Refusal("got an empty --workdir; give a directory, or leave the flag out")
    for stage in values.stages:
        if stage not in stages:
            raise Refusal(f"got the stage {stage!r}; this experiment has {', '.join(stages)}")
    if not values.stages:
        raise Refusal(f"got no stage to run; this experiment has {', '.join(stages)}")
    return values.workdir or "", [s for s in stages if s in values.stages]


def _wrong_value(problem: str, config: ConfigDict) -> str:
    """The sentence for absl's "flag --name=value: reason"."""
    given = re.match(r"flag (--(?:config\.)?([^=]*)=.*?): ", problem, re.DOTALL)
    default = configs.flatten(config.to_dict()).get(given[2]) if given else None
    if given is None or type(default) not in _KINDS:
        return f"{problem}; --help lists the flags"
    return f"got {given[1]}; it must be {_KINDS[type(default)]}, as its default {default} is"


_FLAGS = {
    "config": "FILE.py:VARIANT, the configuration (otherwise the variant that can run here)",
    "workdir": "where everything is written (otherwise runs/NAME-VARIANT); the same command on it "
    "goes on where it stopped",
    "stages": "what to run of STAGES, with commas; it runs in this order",
    "distributed": "one of several processes, on a TPU pod, Slurm or GKE; elsewhere start each "
    "with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
    "help": "shows this",
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _help(name: str, stages: list[str], config: ConfigDict) -> str:
    keys = configs.flatten(config.to_dict())
    return "\n".join(
        [
            f"python -m experiments.{name} [--flag=value ...]; STAGES are {', '.join(stages)}",
            *(f"  --{flag}: {text}" for flag, text in _FLAGS.items()),
            f"  --config.KEY=value: changes one value of the configuration; in {config.variant}:",
            *(f"    --config.{key}={value}" for key, value in keys.items()),
        ]
    )


def _prepare(config: ConfigDict, workdir: Path) -> None:
    """Makes the workdir one experiment's: the configuration it holds must be this one."""
    new = json.loads(config.to_json())
    stored = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if stored.exists():
            changed = configs.differences(json.loads(stored.read_text()), new)
            if changed:
                more = f"; and {len(changed) - 8} more" * (len(changed) > 8)
                raise Refusal(
                    f"{workdir} belongs to another configuration ({'; '.join(changed[:8])}{more}); "
                    f"give another --workdir or the same configuration"
                )
            return
        part = stored.with_suffix(".part")
        part.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
        part.replace(stored)
    except OSError as e:
        problem = f"{e.strerror}: {e.filename}"
        raise Refusal(f"cannot use the workdir {workdir} ({problem}); give another") from None
    except (ValueError, AttributeError):
        raise Refusal(
            f"cannot use the workdir {workdir}: its config.json is not one of ours; give another "
            f"--workdir or delete that file"
        ) from None
