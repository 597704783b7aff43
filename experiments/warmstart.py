"""Makes the embedded world's policy from nothing: tokenizer, demonstrations, supervised updates.

    python -m experiments.warmstart --workdir=DIRECTORY

writes DIRECTORY/policy. The shipped policy (harness_s_jax/assets/miniworld_policy) is its output.
The warm start builds in a premise: reminders elicit what H0 seldom shows. What training then has to
achieve is the transfer to H0.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments import appworld_4b, launcher
from experiments.miniworld_policy import warmstart_config
from harness_s_jax import evaluate, warmstart
from harness_s_jax.analysis import records, tables


def get_config(variant: str = "debug") -> ConfigDict:
    """The main experiment's configuration with a policy of its own, judged on validation tasks."""
    config = appworld_4b.pool_config(variant, "validation", h0_attempts=3)
    config.warmstart = warmstart_config()
    return config


def report(config: Any, workdir: Path, say: launcher.Say) -> None:
    """Prints the rates that the finished policy shows under H0, beside the demonstrated ones."""
    rows = records.read_records(workdir / f"evaluation-{config.evaluation.split}.jsonl")
    say("Behaviours of the policy under H0, percent of attempts\n")
    say(tables.behaviour_table([r for r in rows if r.harness == tables.BASE]))


STAGES = {"warmstart": warmstart.make, "evaluate": evaluate.pool_stage, "report": report}

if __name__ == "__main__":
    launcher.main(__file__, STAGES, lambda: ("debug", "this makes the debug policy"))
