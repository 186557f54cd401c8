"""Figures of benchmarks: a value that was not measured never looks like a good one."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.agents.commits import Commit, judge
from benchmarks.finetune import travel
from benchmarks.finetune.__main__ import BATCH, Killed, figures_of, is_complete, memory_of, step_losses
from benchmarks.report import at_most, median, p95, slope
from benchmarks.session.__main__ import rotated
from benchmarks.session.soak import GOALS_S, Soak
from tests.arch.source_tree import ROOT

PAGES = ROOT / "docs" / "benchmarks"


def _line(step: int, rank: int, units: str, world: int = 2, generation: int = 1, digest: str = "aa") -> str:
    return f"{step}.{rank} {step} {generation} {rank} {world} {digest} {100 + rank} 4 [{units}]"


def test_figures_of_nothing_are_none_and_meet_no_goal() -> None:
    assert p95([]) is None
    assert median([]) is None
    assert at_most(None, 5.0) == "not measured"
    assert (at_most(5.0, 5.0), at_most(5.1, 5.0)) == ("met", "missed")
    with pytest.raises(ValueError, match="no growth"):
        slope([3.0])


def test_figures_of_some_values_are_theirs() -> None:
    values = [float(number) for number in range(100)]
    random.Random(1).shuffle(values)
    assert p95(values) == 95.0
    assert p95([2.0]) == 2.0
    assert median(values) == 49.5
    assert slope([1.0, 3.0, 5.0]) == 2.0


def test_steps_that_a_group_did_not_write_down_as_a_whole_are_counted_as_not_judged() -> None:
    lines = [
        *(_line(1, 0, "0, 1"), _line(1, 1, "2, 3")),
        _line(2, 0, "0, 1"),  # the other member died before it wrote
        *(_line(3, 0, "0, 1", generation=2), _line(3, 1, "2, 3", generation=3)),
        *(_line(4, 0, "0, 1"), _line(4, 1, "2")),
    ]
    judgement = judge([Commit(line) for line in lines], 4)
    assert (judgement.steps, judgement.steps_not_judged, judgement.units_lost) == (4, 2, 1)
    assert judgement.violations == 1, "steps that are not judged are no violation, and no proof either"


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (_line(1, 1, "2, 3", digest="bb"), "hash_violations"),
        (_line(1, 1, "1, 2, 3"), "units_doubled"),
        (_line(1, 1, "2"), "units_lost"),
        (_line(0, 0, "0"), "step_regressions"),
    ],
)
def test_trace_with_fault_has_violation(line: str, field: str) -> None:
    judgement = judge([Commit(_line(1, 0, "0, 1")), Commit(line)], 4)
    assert getattr(judgement, field) == 1
    assert judgement.violations >= 1


def test_soak_without_faults_prints_no_times(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(_line(1, 0, "0, 1, 2, 3", world=1) + "\n")
    soak = Soak(None, None, tmp_path, 1, ["kill_worker"])  # type: ignore[arg-type]
    figures = soak.figures()
    for name in ("kill_to_commit_s_median", *GOALS_S, "longest_pause_s"):
        assert figures[name] is None, name
    assert (figures["commits"], figures["steps_not_judged"], figures["faults"]) == (1, 0, 0)


def test_soak_separates_next_commit_from_longest_pause(
    tmp_path: Path,
) -> None:
    soak = Soak(None, None, tmp_path, 1, ["kill_worker"])  # type: ignore[arg-type]
    lines = [_line(step, 0, "0", world=1, generation=1 + step // 3) for step in (1, 2, 3, 7, 8)]
    (tmp_path / "trace").write_text("\n".join(lines) + "\n")
    soak._await_commit("kill_worker", 1.5, 1)
    soak._await_commit("cut", 1.5, 1)
    assert soak.next_commit_s == [pytest.approx(1.5)], "step 3 is the first of a new group"
    assert soak.pauses_s == {"cut": [pytest.approx(4.0)]}, "from step 3 to step 7"


def test_rounds_of_a_session_begin_with_each_way_in_turn() -> None:
    ways = ["a", "b", "c"]
    orders = [rotated(ways, number) for number in range(6)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a", "b", "c"]
    assert all(sorted(order) == ways for order in orders)


def test_collectives_table_matches_its_json() -> None:
    text = (PAGES / "collectives.md").read_text(encoding="utf-8")
    page = json.loads((PAGES / "collectives.json").read_text(encoding="utf-8"))
    rows = [
        f"| `{name}` | {row['measured']:.3f} | {row['low']:.2f} to {row['high']:.2f} | {row['goal']} |"
        for name, row in page["figures"].items()
    ]
    assert rows == [line for line in text.splitlines() if re.match(r"\| `\w+` \| \d", line)]
    assert page["environment"] in text
    assert len(rows) == 9


def test_readme_speed_matches_collectives_table() -> None:
    figures = json.loads((PAGES / "collectives.json").read_text(encoding="utf-8"))["figures"]
    shares = [figures[name]["measured"] for name in ("lab_1gbit_2h_tls", "lab_1gbit_4h_tls")]
    slower = [round(100 * (1 - share)) for share in shares]
    assert f"it is {slower[0]} to {slower[1]} % slower for 32 MB" in (ROOT / "README.md").read_text("utf-8")


def _killed(losses: list[float], healed: int = 2, checkpoints: int = 1, digest: str = "aa") -> Killed:
    lines = [_line(1, 0, "0, 1"), _line(1, 1, "2, 3", digest=digest)]
    figures = {"trained": 1000, "moments": 2000, "frozen": 10**6}
    received = [{"bytes": 3000, "wire": 3100 + number, "donors": 2} for number in range(healed)]
    verdict = judge([Commit(line) for line in lines], 4)
    return Killed(figures, losses, 2, verdict, received, [3150] * checkpoints, [105, 104, 106])


def test_figures_of_fine_tuning_are_those_of_the_worst_worker() -> None:
    figures = figures_of([2.0, 1.0], 100, _killed([2.0, 1.25]))
    assert figures["loss_gap"] == 0.25
    assert figures["heal_over_trained"] == 3101 / 3000
    assert figures["checkpoint_over_trained"] == 1.05
    assert figures["peak_memory_over_single"] == 1.06
    assert (figures["kills"], figures["samples_lost"], figures["samples_doubled"]) == (2, 0, 0)


@pytest.mark.parametrize(
    ("killed", "why"),
    [
        (_killed([2.0, 1.0], healed=1), "did not get the state"),
        (_killed([2.0, 1.0], checkpoints=0), "no checkpoint"),
        (_killed([2.0, float("nan")]), "not a number"),
        (_killed([2.0, 1.0], digest="bb"), "states of the workers differed"),
    ],
)
def test_fine_tuning_that_was_not_measured_wholly_has_no_figures(killed: Killed, why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        figures_of([2.0, 1.0], 100, killed)


def test_next_kill_waits_for_a_newer_group_of_all_hosts(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    assert not is_complete(trace, 0)
    for generation, expected in ((1, False), (2, True)):
        lines = [_line(4, rank, str(rank), world=3, generation=generation) for rank in range(3)]
        trace.write_text("\n".join(lines) + "\n")
        assert is_complete(trace, 1) is expected
    trace.write_text("\n".join(lines[:2]) + "\n")
    assert not is_complete(trace, 1), "one host has no commit in the new group"


def test_memory_of_a_worker_is_its_peak_with_what_its_children_have_now() -> None:
    use = "block = bytes(range(256)) * 400_000; del block"
    child = f"import time; {use}; print('used', flush=True); time.sleep(60)"
    worker = f"import subprocess, sys; {use}; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"used\n"
            assert 100e6 < memory_of([process.pid]) < 190e6, "the child has freed its block"
            children = [each.pid for each in psutil.Process(process.pid).children()]
            assert memory_of([process.pid, *children]) > 200e6, "two peaks"
        finally:
            for each in (*psutil.Process(process.pid).children(), process):
                each.kill()
    assert memory_of([process.pid]) == 0, "it has ended"


def test_loss_of_a_step_is_the_mean_of_its_samples_also_if_one_was_computed_again() -> None:
    lines = [f"{number} {float(number)}" for number in range(2 * BATCH)]
    assert step_losses("\n".join([*lines[::-1], lines[3]]), 2) == [(BATCH - 1) / 2, BATCH + (BATCH - 1) / 2]
    with pytest.raises(SystemExit, match="sample 7 is missing"):
        step_losses("\n".join(lines[:7] + lines[8:]), 2)


def test_times_of_a_line_are_compared_with_bits_over_its_rate() -> None:
    line = travel.Line("8 Mbit/s", 8e6, 20_000_000, 10_000_000, 6)
    figures = travel.figures_of({line: (25.0, 11.0)})
    assert (figures["base_over_line"], figures["gradient_over_line"]) == ({line.name: 1.25}, {line.name: 1.1})
    assert travel.rows(figures)[-2:] == [
        "| base model | 1.25: 20 MB in 25 s |",
        "| gradient of the adapter | 1.10: 10 MB in 11 s |",
    ]


def test_measured_times_of_the_page_on_fine_tuning_match_their_json() -> None:
    page = (ROOT / "docs" / "finetune.md").read_text("utf-8")
    for figures in json.loads((PAGES / "travel.json").read_text("utf-8")):
        date, commit = re.findall(r"^\S+|(?<=commit )\w+", figures["environment"])
        table = "\n".join(travel.rows(figures))
        assert f"Measured on {date}, commit {commit}:\n\n{table}\n" in page
