"""Figure 1 of the paper: locality and complementarity of the siblings, for the policy as it is.

    python -m experiments.figure1

Success by family under H0 and each sibling; tasks each sibling fixes and breaks; the union of one
attempt under each sibling against H0 resampled as often, with the paired difference.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments import appworld_4b, launcher
from harness_s_jax import evaluate, warmstart
from harness_s_jax.analysis import records, tables


def get_config(variant: str = "debug") -> ConfigDict:
    """The main experiment's configuration, on validation tasks, with more attempts under H0."""
    siblings = 12  # of the shipped pool
    return appworld_4b.pool_config(variant, "validation", h0_attempts=siblings)


def report(config: Any, workdir: Path, say: launcher.Say) -> None:
    """Prints the tables from the records of the evaluation, and keeps them in report/figure1.md."""
    split = config.evaluation.split
    rows = records.read_records(workdir / f"evaluation-{split}.jsonl")
    if not rows:
        raise launcher.Refusal(f"there are no records in {workdir}; run the stage evaluate first")
    by_task = tables.counts(rows)
    siblings = [h for h in by_task if h != tables.BASE]
    cover = tables.coverage(by_task, siblings)
    text = "\n\n".join(
        [
            "## Success by family, percent",
            tables.family_table(rows),
            f"## Union of one attempt under each of {len(siblings)} siblings, against H0 "
            f"resampled {len(siblings)} times, percent of tasks with 95% intervals",
            tables.markdown(["", "tasks solved"], list(cover.items())),
            "## Behaviours under H0, percent of attempts",
            tables.behaviour_table([r for r in rows if r.harness == tables.BASE]),
        ]
    )
    say(f"\n{text}\n")
    (workdir / "report").mkdir(exist_ok=True)
    (workdir / "report" / "figure1.md").write_text(text + "\n")


STAGES = {"warmstart": warmstart.use, "evaluate": evaluate.pool_stage, "report": report}

if __name__ == "__main__":
    launcher.main(__file__, STAGES, launcher.choose_variant)
