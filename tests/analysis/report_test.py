"""The report's numbers against naive ones, and what it says where something is missing."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from harness_s_jax.analysis import report, runs
from tests.analysis.workdirs import (
    CHOICES,
    EVOLUTION,
    NEEDS,
    TRAINED,
    WARMSTART,
    train_line,
    workdir,
)


@pytest.fixture
def run(tmp_path: Path) -> runs.Run:
    return report.read_run(workdir(tmp_path / "run"))


def cells(markdown: str, *, heading: str = "") -> list[list[str]]:
    """The table rows under a heading, without its separator lines."""
    part = markdown.partition(f"## {heading}")[2].partition("\n## ")[0] if heading else markdown
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [
        [c.strip() for c in line[2:-2].split(" | ")] for line in lines if set(line) - set("| -")
    ]


def rewards(
    table: Mapping[str, Mapping[str, str]], pick: Mapping[str, str]
) -> dict[str, list[int]]:
    """task -> valid rewards, for a harness a task."""
    got = {t: [int(r) for r in table.get(h, {}).get(t, "") if r != "!"] for t, h in pick.items()}
    return {t: r for t, r in got.items() if len(r) == 3}


def test_main_table(run: runs.Run):
    text = report.success([run])
    rows = cells(text)
    assert rows[0] == ["policy", "H0", "H_best", "H_rank1", "tasks"]
    means = {(row[0], i): [c.split(" ")[0] for c in row[1:4]] for i, row in enumerate(rows)}
    # t3 under fix lost an attempt: it leaves both measures of H_best, and only those.
    assert means["warm start", 1] == ["33.3", "55.6", "66.7"]
    assert means["Harness-S", 2] == ["50.0", "75.0", "58.3"]
    assert means["warm start", 4] == ["50.0", "66.7", "100.0"]
    assert means["Harness-S", 5] == ["75.0", "100.0", "75.0"]
    assert [row[4] for row in rows if row[0] != "policy"] == ["4 / 3 / 4", "4"] * 2
    assert "`fix` (warm start), `other` (Harness-S)" in text


def test_paired_differences_equal_naive_ones(run: runs.Run):
    rows = {(r[0], r[1]): r[2:] for r in cells(report.differences([run]))}
    h0 = dict.fromkeys(NEEDS, "h0")
    best = [dict.fromkeys(NEEDS, h) for h in ("fix", "other")]
    rank1 = [CHOICES[state]["h_rank1"] for state in runs.STATES]
    expected = {
        "H0": (h0, h0),
        "H0, needy": (dict.fromkeys(("t0", "t1"), "h0"),) * 2,
        "H0, none": (dict.fromkeys(("t2", "t3"), "h0"),) * 2,
        "H_best": best,
        "H_rank1": rank1,
    }
    for condition, (before, after) in expected.items():
        old, new = rewards(WARMSTART, before), rewards(TRAINED, after)
        both = sorted(set(old) & set(new))
        average = 100 * np.mean([np.mean(new[t]) - np.mean(old[t]) for t in both])
        passed = 100 * np.mean([max(new[t]) - max(old[t]) for t in both])
        got = rows[condition, "Harness-S"]
        assert float(got[0].split(" ")[0]) == pytest.approx(average, abs=0.051), condition
        assert float(got[1].split(" ")[0]) == pytest.approx(passed, abs=0.051), condition
        assert got[2] == str(len(both)), condition


def test_costs_add_up(run: runs.Run):
    rows = {row[1]: row[2:] for row in cells(report.costs([run]))}
    assert rows["initial"] == ["24", "480", "1,200"]
    assert rows["rescue"] == ["12", "240", "600"]
    assert rows["anchor"] == ["1", "1", "1"]
    assert rows["training in all"] == ["37", "721", "1,801"]
    assert rows["validation"] == ["6", "120", "300"]
    assert list(rows)[-2:] == ["training in all", "validation"]


def test_a_counter_that_nobody_wrote_is_not_zero(tmp_path: Path):
    line = train_line(1)
    del line["count/rescue_attempts"]
    run = report.read_run(workdir(tmp_path / "run", lines=[line]))
    rows = {row[1]: row[2:] for row in cells(report.costs([run]))}
    assert rows["rescue"][0] == rows["training in all"][0] == "-"
    assert rows["training in all"][1] == "241"


def test_behaviours_and_routing_before_and_after(run: runs.Run):
    rows = {(r[0], r[1]): r[2:] for r in cells(report.behaviours([run]))}
    assert rows["behaviour", "on tasks"] == ["warm start", "Harness-S"]
    assert rows["`docs`", "needed"] == ["33.3", "100.0"]
    assert rows["`docs`", "not needed"] == ["33.3", "33.3"]
    assert rows["`verify`", "needed"] == ["0.0", "0.0"]
    first = {r[0]: r[1:] for r in cells(report.routing([run]))}
    assert first["warm start"][0].startswith("50.0 [")
    assert first["Harness-S"][0].startswith("75.0 [")
    assert first["warm start"][2].startswith("+33.3 [")  # t1 3 of 3, t2 1 of 3 more, of 4 tasks
    assert first["Harness-S"][2].startswith("+8.3 [")


def test_several_runs_share_a_warm_start_and_compare_with_the_first(tmp_path: Path):
    other = {**TRAINED, "h0": {"t0": "000", "t1": "000", "t2": "111", "t3": "111"}}
    group = [
        report.read_run(workdir(tmp_path / "a", "grpo", trained=other)),
        report.read_run(workdir(tmp_path / "b", "harness_s")),
    ]
    table = [row[0] for row in cells(report.success(group))]
    assert table == ["policy", "warm start", "GRPO", "Harness-S"] * 2
    minus = report.differences(group).partition("minus GRPO")[2]
    rows = {(r[0], r[1]): r[2:] for r in cells(minus)}
    assert rows["H0", "Harness-S"][0].startswith("+0.0 [")  # +3 +1 -3 -1 of 12
    assert rows["H0, needy", "Harness-S"][0].startswith("+66.7 [")
    assert rows["H0, none", "Harness-S"][1:] == ["-50.0 [-100.0, +0.0]", "2"]


def test_runs_of_one_method_are_told_apart(tmp_path: Path):
    later = {**WARMSTART, "h0": {**WARMSTART["h0"], "t0": "111"}}
    group = [
        report.read_run(workdir(tmp_path / "a", seed=1)),
        report.read_run(workdir(tmp_path / "b", seed=2, warmstart=later)),
        report.read_run(workdir(tmp_path / "c", "grpo")),
        report.read_run(workdir(tmp_path / "d", "grpo")),
    ]
    names = report.labels(group)
    assert names[:2] == ["Harness-S, seed 1", "Harness-S, seed 2"]
    assert names[2:] == [f"GRPO, seed 0, `{tmp_path / name}`" for name in "cd"]
    first = [label for label, _, state in report.policies(group) if state == "warmstart"]
    assert first == [f"warm start of {name}" for name in names]


def test_an_evolved_pool_has_a_section_and_no_other_run_a_row(tmp_path: Path, run: runs.Run):
    assert report.evolution([run]) == ""
    assert "Evolved pool" not in report.write([run], tmp_path / "without")
    assert "Evolved pool" not in (tmp_path / "without" / "report.md").read_text()
    grown = report.read_run(workdir(tmp_path / "grown", "grpo", evolution=EVOLUTION))
    report.write([run, grown], tmp_path / "with")
    page = (tmp_path / "with" / "report.md").read_text()
    assert page.count("## Evolved pool") == 1
    assert cells(page, heading="Evolved pool") == [
        ["run", "siblings", "attempts", "union", "H0 resampled", "difference", "tasks"],
        [
            "GRPO", "34", "1,880", "75.0 [50.0, 100.0]", "50.0 [25.0, 70.0]",
            "+25.0 [-5.0, +50.0]", "20",
        ],
    ]  # fmt: skip
    assert "Evolved pool" in (tmp_path / "with" / "index.html").read_text()
    assert "\n\n\n" not in page


def test_a_wrong_evolution_is_one_sentence_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wrong = {**EVOLUTION, "coverage": {"union": EVOLUTION["coverage"]["union"]}}
    path = workdir(tmp_path / "run", evolution=wrong)
    assert report.main([str(path), f"--out={tmp_path / 'none'}"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "evolution.json" in said.err
    assert not said.out
    assert not (tmp_path / "none").exists()


def test_same_input_gives_same_bytes_and_the_main_tables(run: runs.Run, tmp_path: Path):
    text = report.write([run], tmp_path / "one")
    assert report.write([run], tmp_path / "two") == text
    one, two = (
        {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "two")
    )
    assert one == two
    assert {"report.md", "index.html", "group_effective_fraction.svg"} <= set(one)
    assert not [name for name in one if name.endswith(".part")]
    page = one["report.md"].decode()
    assert text in page
    assert cells(page)[1] == [
        "Harness-S", "`harness_s`", "0", "3", "4", "2", "3", f"`{run.workdir}`",
    ]  # fmt: skip
    for name in one:
        if name.endswith(".svg"):
            assert f"]({name})" in page
    html = one["index.html"].decode()
    assert html.count("data:image/svg+xml;base64,") == html.count("<img") == len(one) - 2
    assert "<script" not in html
    assert not re.search(r"(src|href)=\"(?!data:)", html)


def test_what_others_chose_is_escaped(tmp_path: Path):
    bad = "<b>x</b>|`y`_*z*"
    names = json.loads(json.dumps(CHOICES).replace('"fix"', json.dumps(bad)))
    rename = {"warmstart": WARMSTART, "trained": TRAINED}
    tables = {
        state: {bad if h == "fix" else h: tasks for h, tasks in table.items()}
        for state, table in rename.items()
    }
    names["rare"] = ["<i>docs"]
    kind = "<script>a|b(1)</script>"
    lines = [train_line(0)]
    group = [
        report.read_run(
            workdir(
                tmp_path / name, kind, choices=names, lines=lines,
                warmstart=tables["warmstart"], trained=tables["trained"],
            )
        )
        for name in ("a&<u>|", "twin")
    ]  # fmt: skip
    report.write(group, tmp_path / "out")
    html = (tmp_path / "out" / "index.html").read_text()
    for raw in ("<b>", "<i>", "<u>", "<script", "a&<"):
        assert raw not in html
    assert "<code>&lt;b&gt;x&lt;/b&gt;|`y`_*z*</code>" in html
    assert "<code>&lt;script&gt;a|b(1)&lt;/script&gt;</code>" in html
    assert "\\" not in html.partition("</style>")[2]  # no escape of Markdown's is left
    widths = {
        len(re.findall("<t[hd]", row))
        for row in re.findall(
            r"<tr>.*?</tr>", html.partition("<table>")[2].partition("</table>")[0], re.DOTALL
        )
    }
    assert widths == {8}


def test_rescue_never_triggered_is_said_in_words(tmp_path: Path):
    stale = tmp_path / "out" / "rescue_success_fraction.svg"
    stale.parent.mkdir()
    stale.write_text("of an earlier report")
    lines = [train_line(n, rescued=False) for n in range(4)]
    plain = report.read_run(workdir(tmp_path / "grpo", "grpo", lines=lines))
    report.write([plain], tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    assert page.count("GRPO: no rescue was triggered.") == 2
    assert "rescue_success_fraction.svg" not in page
    assert not stale.exists()
    assert cells(page, heading="Training signal")[1] == ["GRPO", "50.0", "50.0", "0.0", "-"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = workdir(tmp_path / "run", lines=[{"time": 1.0, "stage": "train", "step": 0}])
    assert report.main([str(path), f"--out={tmp_path / 'out'}"]) == 0
    assert "## Success on test tasks" in capsys.readouterr().out
    assert (tmp_path / "out" / "index.html").exists()
    for arguments in ([str(tmp_path / "absent")], [str(path), str(path)]):
        assert report.main([*arguments, f"--out={tmp_path / 'none'}"]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert not said.out
    assert not (tmp_path / "none").exists()
