"""The fixed mixtures that Harness-S is compared with: who attempts a task from the start.

The paper trains on "H0 + siblings" as a fixed mixture and does not say how it is composed (method
E), so both readings are here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Literal

from harness_s_jax.harness.spec import HarnessSpec
from harness_s_jax.types import Task

Unit = Literal["within", "between"]


def mixed_members(
    h0: HarnessSpec,
    siblings: Sequence[HarnessSpec],
    task: Task,
    *,
    attempts: int,
    unit: Unit,
    sibling_share: float,
    run_seed: int,
    step: int,
) -> dict[int, HarnessSpec]:
    """The harness of each of a group's attempts, by number.

    "within": in every group a share of the attempts, rounded, runs under distinct siblings drawn at
    random. "between": a share of the groups runs under one sibling alone, the others under H0.

    Raises:
      ValueError: the share asks for more distinct siblings than there are.
    """
    seed = hashlib.sha256(f"mixture/{run_seed}/{step}/{task.id}".encode()).hexdigest()
    rng = random.Random(seed)
    if unit == "between":
        spec = rng.choice(siblings) if rng.random() < sibling_share else h0
        return dict.fromkeys(range(attempts), spec)
    count = round(sibling_share * attempts)
    if count > len(siblings):
        raise ValueError(f"got {count} attempts under siblings; there are {len(siblings)} siblings")
    drawn = rng.sample(list(siblings), count)
    return dict(enumerate([*[h0] * (attempts - count), *drawn]))
