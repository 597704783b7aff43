"""The tables of an evaluation, from attempt records: success, locality, complementarity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from harness_s_jax.analysis.records import behaviour_rates
from harness_s_jax.analysis.statistics import Interval, bootstrap, pass_at_k, union_coverage
from harness_s_jax.types import AttemptRecord

Counts = dict[str, dict[str, tuple[int, int]]]  # harness -> task -> (solved, valid attempts)
BASE = "h0"


def counts(records: Sequence[AttemptRecord]) -> Counts:
    """Solved and valid attempts; infrastructure failures are no attempts."""
    table: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for r in records:
        if r.outcome != "infra":
            cell = table[r.harness][r.task]
            cell[0] += r.reward == 1.0
            cell[1] += 1
    return {h: {t: (c[0], c[1]) for t, c in tasks.items()} for h, tasks in table.items()}


def split_by_need(
    records: Sequence[AttemptRecord], rare: Sequence[str]
) -> dict[str, list[AttemptRecord]]:
    """All records, those of tasks that need a rare behaviour, and those of tasks that need none."""
    needy = [r for r in records if set(r.needs) & set(rare)]
    none = [r for r in records if not set(r.needs) & set(rare)]
    return {"all": list(records), "needy": needy, "none": none}


def success(table: Mapping[str, tuple[int, int]], k: int) -> tuple[Interval, Interval]:
    """Avg@k and Pass@k of one harness, with intervals by task bootstrap.

    A task with fewer than k valid attempts is left out of both; the intervals' n says how many
    stayed. Avg@k is the mean reward of an attempt.
    """
    kept = [(s, n) for s, n in table.values() if n >= k]
    return bootstrap([s / n for s, n in kept]), bootstrap([pass_at_k(n, s, k) for s, n in kept])


def success_table(records: Sequence[AttemptRecord], rare: Sequence[str], k: int = 3) -> str:
    """Markdown: one row a harness, in order of first appearance; percent with 95% intervals."""
    parts = {name: counts(rows) for name, rows in split_by_need(records, rare).items()}
    head = ["harness", f"Avg@{k}, all", f"Pass@{k}, all", f"Avg@{k}, needy", f"Avg@{k}, none",
            "fixed", "broken", "tokens"]  # fmt: skip
    rows = []
    for harness in dict.fromkeys(r.harness for r in records):
        average, passed = success(parts["all"].get(harness, {}), k)
        needy, _ = success(parts["needy"].get(harness, {}), k)
        none, _ = success(parts["none"].get(harness, {}), k)
        fixed, broken = locality(parts["all"], harness)
        tokens = mean_tokens([r for r in records if r.harness == harness])
        rows.append([harness, average, passed, needy, none, fixed, broken, f"{tokens:.0f}"])
    return markdown(head, rows)


def mean_tokens(records: Sequence[AttemptRecord]) -> float:
    """Context tokens of an attempt that was not lost; NaN without one."""
    tokens = [r.context_tokens for r in records if r.outcome != "infra"]
    return float(np.mean(tokens)) if tokens else float("nan")


def family_table(records: Sequence[AttemptRecord]) -> str:
    """Markdown: success in percent by family (rows) and harness (columns)."""
    harnesses = list(dict.fromkeys(r.harness for r in records))
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
    for r in records:
        if r.outcome != "infra":
            rewards[r.family, r.harness].append(r.reward)
    needs = {r.family: ", ".join(r.needs) or "-" for r in records}
    rows = [
        [family, needs[family], *(_percent(rewards[family, h]) for h in harnesses)]
        for family in sorted(needs, key=lambda f: (needs[f] != "-", needs[f], f))
    ]
    return markdown(["family", "needs", *harnesses], rows)


def behaviour_table(records: Sequence[AttemptRecord]) -> str:
    """Markdown: how often attempts show each behaviour where the task needs it and where not."""
    names = sorted({name for r in records for name in (*r.needs, *r.shown)})
    rates, places = behaviour_rates(records, names), ("needed", "not needed")
    rows = [
        [name, *(f"{100 * rates[name][w]:.1f}" if w in rates[name] else "-" for w in places)]
        for name in names
    ]
    return markdown(["behaviour", *places], rows)


def locality(table: Counts, harness: str) -> tuple[int, int]:
    """Tasks that a sibling fixes and that it breaks, against H0.

    A task counts as solved under a harness if at least half of its attempts are. Only tasks tried
    under both count.
    """
    ours, base = table.get(harness, {}), table.get(BASE, {})
    both = [t for t in ours if t in base]
    now = [(_mostly(ours[t]), _mostly(base[t])) for t in both]
    return sum(a and not b for a, b in now), sum(b and not a for a, b in now)


def coverage(table: Counts, siblings: Sequence[str]) -> dict[str, Interval]:
    """One attempt under each sibling against as many under H0: share of tasks solved at least once.

    Both are unbiased; "difference" is paired by task. Needs len(siblings) attempts under H0.
    """
    k = len(siblings)
    base = table.get(BASE, {})
    tasks = [
        t for t, (_, n) in base.items()
        if n >= k and all(table.get(s, {}).get(t, (0, 0))[1] for s in siblings)
    ]  # fmt: skip
    union = [union_coverage([table[s][t][0] / table[s][t][1] for s in siblings]) for t in tasks]
    resampled = [pass_at_k(base[t][1], base[t][0], k) for t in tasks]
    return {
        "union": bootstrap(union),
        "h0 resampled": bootstrap(resampled),
        "difference": bootstrap(np.subtract(union, resampled)),
    }


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [[str(c) for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [" | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" for line in lines)


def _mostly(cell: tuple[int, int]) -> bool:
    return 2 * cell[0] >= max(1, cell[1])


def _percent(rewards: Sequence[float]) -> str:
    return f"{100 * float(np.mean(rewards)):.0f}" if rewards else "-"
