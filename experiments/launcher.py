"""The command line that every experiment shares: flags, workdir, stages."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from harness_s_jax import config as configs
from harness_s_jax import metrics

Say = Callable[[str], None]
Stage = Callable[[Any, Path, metrics.Writer, Say], None]
NOT_BUILT = ("evolve", "train")  # stages of the method that this version does not have yet


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
        _prepare(config, workdir)
        for name in chosen:
            started = time.monotonic()
            stages[name](config, workdir, metrics.Writer(workdir), say)
            seconds = time.monotonic() - started
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            values = {f"time/{name}_s": round(seconds, 2), "memory/peak_mb": round(peak, 1)}
            metrics.Writer(workdir).write(name, values)
            say(f"{name}: {seconds:.1f} s, peak memory {peak:.0f} MB")
    except (Refusal, configs.ConfigError) as e:
        print(f"{Path(path).stem}: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        sys.exit(130)


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
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "the configuration, FILE.py:VARIANT", flag_values=values, lock_config=True
    )
    flags.DEFINE_string("workdir", None, "where everything is written", flag_values=values)
    flags.DEFINE_list("stages", stages, "what to run, in this order", flag_values=values)
    flags.DEFINE_bool("help", False, "shows the flags", short_name="h", flag_values=values)

    arguments = sys.argv[1:]
    if not any(a.split("=")[0].lstrip("-") == "config" for a in arguments):
        variant, reason = choose()
        if not {"--help", "-h"} & set(arguments):
            say(f"{name}: running the variant {variant}: {reason}")
        arguments = [f"--config={path}:{variant}", *arguments]
    try:
        rest = values([path, *arguments])
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as e:
        raise Refusal(f"{_first_line(e)}; --help lists the flags") from None
    if values.help:
        say(values.main_module_help())
        sys.exit(0)
    if len(rest) > 1:
        raise Refusal(f"got the argument {rest[1]!r}; every setting is a flag: --name=value")
    config = values.config
    configs.check(config.to_dict())
    if config.variant == "paper":
        missing = missing_for_paper(config.policy.checkpoint)
        missing.append("no AppWorld (the environment is not in this version; only miniworld is)")
        raise Refusal(f"the variant paper cannot run here: {'; '.join(missing)}")
    for stage in values.stages:
        if stage in NOT_BUILT and stage not in stages:
            raise Refusal(f"the stage {stage} is not in this version; it has {', '.join(stages)}")
        if stage not in stages:
            raise Refusal(f"got the stage {stage!r}; this experiment has {', '.join(stages)}")
    workdir = values.workdir or f"runs/{name}-{config.variant}"
    return config, Path(workdir), [s for s in stages if s in values.stages]


def _first_line(error: Exception) -> str:
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _prepare(config: ConfigDict, workdir: Path) -> None:
    """Makes the workdir one experiment's: the configuration it holds must be this one."""
    new = json.loads(config.to_json())
    stored = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if stored.exists():
            changed = configs.differences(json.loads(stored.read_text()), new)
            if changed:
                raise Refusal(
                    f"{workdir} belongs to another configuration ({'; '.join(changed)}); "
                    f"give another --workdir or the same configuration"
                )
        part = stored.with_suffix(".part")
        part.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
        part.replace(stored)
    except (OSError, json.JSONDecodeError) as e:
        raise Refusal(f"cannot use the workdir {workdir}: {e}; give another --workdir") from None
