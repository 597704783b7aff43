"""AppWorld with Qwen3.5-4B, the main table of the paper; `debug` is the embedded world.

    python -m experiments.appworld_4b                          debug where there is no accelerator
    python -m experiments.appworld_4b --config=experiments/appworld_4b.py:paper

Reported by the paper (4B, Pass@3 under H0): GRPO 60.31, Harness-S 67.56.
Measured by us (debug): README.md, with the command.
"""

from ml_collections import ConfigDict

from experiments import launcher
from harness_s_jax import evaluate, warmstart

VARIANTS = ("debug", "paper")


def get_config(variant: str = "debug") -> ConfigDict:
    """`debug`: the embedded world and the shipped policy, minutes on a CPU. `paper`: Qwen3.5-4B."""
    if variant not in VARIANTS:
        raise ValueError(f"got the variant {variant!r}; there are {', '.join(VARIANTS)}")
    paper = variant == "paper"
    return ConfigDict(
        {
            "variant": variant,
            "seed": 0,
            "environment": "appworld" if paper else "miniworld",
            "policy": {"checkpoint": ""},  # a directory; for debug, empty is the shipped policy
            "limits": {
                "context_tokens": 32768 if paper else 256,
                "turn_tokens": 3000 if paper else 96,
                "temperature": 1.0,
            },
            "sampler": {"slots": 64, "prefill_rows": 16, "prefill_chunk": 16, "decode_steps": 8},
            "rollout": {"concurrency": 96, "infra_retries": 2, "deadline_s": 600.0},
            "evaluation": {
                "split": "test",
                "tasks": 100,
                "attempts": 3,  # at each task under each sibling; Pass@3 needs three
                "h0_attempts": 3,
            },
        }
    )


STAGES = {"warmstart": warmstart.use, "evaluate": evaluate.stage}

if __name__ == "__main__":
    launcher.main(__file__, STAGES, launcher.choose_variant)
