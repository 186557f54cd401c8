"""Figures of a split model under memory limits: from rows of workers that are written here."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.bigger import page
from benchmarks.bigger.__main__ import Measured, Round, figures_of, kept_blocks, rival_seconds, shares_of
from benchmarks.bigger.bench import SplitRun
from benchmarks.bigger.figures import (
    Call,
    Kill,
    MovedState,
    Recovery,
    Row,
    Traffic,
    bound_seconds,
    first_commit,
    loss_gap,
    moved_over_trained,
    prediction_error,
    read_rows,
    recovery_of,
    samples_doubled,
    samples_lost,
    share_of_bound,
    step_seconds,
    summary,
)
from benchmarks.bigger.kills import KilledRun, planned_faults
from benchmarks.bigger.limits import HeldWatch, Limit, LimitedHost, held_bytes, oom_kills
from benchmarks.bigger.model import SIZES
from lab import Host

KILL = Kill("worker", "h2", 30.5, 3)


def row(
    step: int,
    at: float,
    *,
    generation: int = 1,
    world: int = 3,
    loss: float = 0.0,
    busy_s: float = 8.0,
    moved: int = 0,
    mirrored: int = 0,
) -> Row:
    """Return a row of a worker whose stage trains 300 bytes."""
    return Row(step, generation, world, loss or float(step), busy_s, at, 300, moved, None, mirrored)


def steady(steps: int, busy_s: float) -> list[Row]:
    """Return the rows of a worker that commits a step every ten seconds."""
    return [row(step, 10.0 * step, busy_s=busy_s) for step in range(1, steps + 1)]


def test_rows_are_read_without_the_line_that_a_kill_cut_off() -> None:
    whole = json.dumps(list(row(1, 10.0))) + "\n"
    assert read_rows(whole + whole[:20]) == [row(1, 10.0)]


def test_seconds_of_a_step_are_those_of_the_last_worker_in_a_settled_group() -> None:
    late = [each._replace(at=each.at + (1.0 if each.step == 4 else 0.0)) for each in steady(5, 1.0)]
    assert step_seconds([steady(5, 1.0), late]) == {3: 10.0, 4: 11.0, 5: 9.0}
    regrouped = [*steady(3, 1.0), row(4, 90.0, generation=2), row(5, 100.0, generation=2)]
    assert step_seconds([regrouped]) == {3: 10.0}, "a new group settles first"


def test_bound_is_that_of_the_slowest_stage_or_link() -> None:
    workers = [steady(4, 7.0), steady(4, 8.0), steady(4, 5.0)]
    fast, slow = Traffic(1000, 1e9), Traffic(100_000_000, 1e9)
    assert set(bound_seconds(workers, 12, fast).values()) == {8.0}
    assert bound_seconds(workers, 12, slow)[1] == pytest.approx(9.6)
    assert share_of_bound(workers, 12, fast) == pytest.approx(0.8)
    assert share_of_bound(workers, 12, slow) == pytest.approx(0.96)


def test_losses_and_samples_are_compared_with_the_same_steps_alone() -> None:
    expected = {step: float(step) for step in range(1, 5)}
    good = steady(4, 1.0)
    assert (loss_gap([good], expected), samples_lost([good], 4, 3), samples_doubled([good], 3)) == (0.0, 0, 0)
    wrong = [each._replace(loss=each.loss + 0.5) for each in good]
    assert loss_gap([good, wrong], expected) == 0.5
    assert samples_lost([good[:2], good[3:]], 4, 3) == 3
    assert samples_doubled([good, wrong[:1]], 3) == 3, "two groups have committed the step"
    assert samples_doubled([[*good, good[-1]]], 3) == 3, "a worker has committed it twice"


def test_commit_after_a_death_is_one_that_the_next_group_computed() -> None:
    old = steady(3, 1.0)
    applied = [*old[:2], row(3, 31.0, generation=2, world=2)]  # voted on before the death
    assert first_commit([old, applied], KILL, 3) is None
    computed = row(4, 42.0, generation=2, world=2)
    assert first_commit([[*old, computed], applied], KILL, 3) == computed
    assert first_commit([[*old, computed], old], KILL, 3) == computed


def test_parts_of_a_recovery_sum_up_to_it() -> None:
    commit = row(4, 42.5, generation=2, world=2)
    calls = [
        Call("load", 1.0, 5.0),  # at the start of the run
        *(Call("join_next_group", 31.0, 33.0), Call("load", 33.5, 36.5)),
        *(Call("join_next_group", 31.5, 33.0), Call("load", 34.0, 37.5), Call("load", 37.5, 38.5)),
        Call("join_next_group", 50.0, 51.0),
    ]
    recovery = recovery_of(KILL, commit, calls)
    assert recovery == Recovery(12.0, 0.5, 2.5, 5.0, 4.0)
    assert recovery.kill_to_commit_s == sum(recovery[1:])
    assert recovery_of(KILL, commit, calls[1:2]) == Recovery(12.0, 0.5, 2.0, 0.0, 9.5), "nothing is loaded"


def test_moved_state_is_counted_until_the_commit_on_the_survivors() -> None:
    commit = row(4, 42.0, generation=2, world=2)
    dead = steady(3, 1.0)
    first = [*steady(3, 1.0), row(4, 42.0, generation=2, world=2, moved=240, mirrored=150)]
    second = [
        *steady(3, 1.0),
        row(4, 42.5, generation=2, world=2, moved=90),
        row(5, 50.0, generation=3, moved=900),
    ]
    assert moved_over_trained(KILL, commit, [first, second, dead], 2) == pytest.approx((1.1, 0.5))


def test_percentile_of_ten_recoveries_is_the_longest() -> None:
    recoveries = [Recovery(float(number), 1.0, 2.0, 3.0, number - 6.0) for number in range(6, 16)]
    figures = summary(recoveries)
    assert (figures["kill_to_commit_s_p95"], figures["kill_to_commit_s"]) == (15.0, 10.5)
    assert (figures["detect_s"], figures["load_s"], figures["step_s"]) == (1.0, 3.0, 4.5)
    assert set(summary([]).values()) == {None}


def test_faults_are_those_of_the_seed_and_hit_each_host() -> None:
    faults = planned_faults(10, 1)
    assert faults == planned_faults(10, 1) != planned_faults(10, 2)
    assert [fault.kind for fault in faults].count("host") == 4
    assert {fault.place for fault in faults} == {0, 1, 2}
    assert all(0 <= fault.share < 1 for fault in faults)


def test_samples_of_fsdp2_are_shared_by_speed() -> None:
    assert shares_of(12, (0.85, 0.6, 0.5)) == [5, 4, 3]
    assert shares_of(3, (0.9, 0.05, 0.05)) == [1, 1, 1]
    assert rival_seconds([(5.0, 1.0), (4.9, 51.0), (4.8, 103.0)]) == [50.0, 52.0]


def test_peaks_are_kept_between_two_watches(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("total_active_file 100\ntotal_inactive_file 0\n")
    [host] = hosts(1)
    watch = HeldWatch([host._replace(group=tmp_path)])
    for usage, peak in ((400, 300), (900, 800), (500, 800)):
        (tmp_path / "memory.usage_in_bytes").write_text(str(usage))
        with watch:
            deadline = time.monotonic() + 10.0
            while watch.peaks != [peak] and time.monotonic() < deadline:
                time.sleep(0.02)
        assert watch.peaks == [peak]
    assert watch.over_limit() == pytest.approx(800 / 1_000_000)


def hosts(*limits_mb: int) -> list[LimitedHost]:
    """Return hosts with these limits, which do not exist."""
    host = Host("h0", "", "", "", Path())
    return [LimitedHost(host, Limit(limit * 1_000_000, 1.0), Path()) for limit in limits_mb]


def test_fsdp2_keeps_blocks_if_the_host_with_the_least_memory_has_room() -> None:
    size = SIZES["full"]
    assert kept_blocks(size, hosts(9000, 4100)) == 2
    assert kept_blocks(size, hosts(3300, 2500)) == 0
    assert kept_blocks(size, hosts(90_000)) == size.layers - 1


def test_figures_of_a_whole_benchmark_are_complete() -> None:
    workers = [[each._replace(predicted_s=9.5) for each in steady(8, busy_s)] for busy_s in (8.5, 8.0, 7.0)]
    run = SplitRun(workers, [[], [], []], "")
    recoveries = [Recovery(float(number), 1.0, 2.0, 3.0, number - 6.0) for number in range(6, 16)]
    killed = KilledRun(run, recoveries, [MovedState(0.5, 1.0), MovedState(1.05, 2.0)], 8)
    peaks, rivals = HeldWatch(hosts(1000, 1000)), HeldWatch(hosts(1000, 1000))
    peaks.peaks, rivals.peaks = [800_000_000, 900_000_000], [950_000_000, 0]
    rounds = [Round(run, [(1.0, 50.0), (2.0, 104.0), (3.0, 150.0)])] * 2
    measured = Measured(rounds, killed, peaks, rivals, 0)
    figures = figures_of(SIZES["tiny"], measured, [workers[0], workers[0]], 2_400_000_000)
    assert {line.name for line in page.LINES} <= figures.keys()
    assert None not in figures.values()
    assert (figures["over_fsdp2"], figures["share_of_bound"], figures["loss_gap"]) == (5.0, 0.85, 0.0)
    assert (figures["peak_memory_over_limit"], figures["model_over_limit"]) == (0.9, 2.0)
    assert (figures["samples_lost"], figures["stage_state_bytes_moved"]) == (0, 1.05)
    given = {"size": "tiny", "seed": 1, "environment": "today", "cores": (1, 1, 1), "parameters": 1}
    given["command"] = "python -m benchmarks.bigger"
    assert "(missed)" not in page.render({**figures, **given, "model_bytes": 2_400_000_000})


def test_page_cache_is_not_held_memory() -> None:
    assert (
        held_bytes(1000, "cache 700\ntotal_active_file 300\ntotal_inactive_file 150\ntotal_rss 90\n") == 550
    )
    assert oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n") == 2


def test_prediction_is_compared_with_the_median_step() -> None:
    predicted = [each._replace(predicted_s=9.0) for each in steady(4, 1.0)]
    assert prediction_error([predicted, steady(4, 1.0)]) == pytest.approx(0.1)
    assert prediction_error([steady(4, 1.0)]) is None


def test_page_names_missed_goals_and_what_was_not_measured(tmp_path: Path) -> None:
    figures: dict[str, object] = {
        "size": "tiny",
        "seed": 1,
        "environment": "today",
        "cores": (0.85, 0.6, 0.5),
        "command": "python -m benchmarks.bigger --quick",
    }
    figures |= {"limits_mb": (1200, 1100, 1000), "parameters": 1_000_000, "model_bytes": 4_000_000}
    figures |= {"over_fsdp2": 4.2, "share_of_bound": 0.8123456, "loss_gap": 2e-7, "prediction_error": None}
    page.write(figures, tmp_path)
    text = (tmp_path / "bigger.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert rows["over_fsdp2"].endswith("| 4.2 (missed) | >= 5 |")
    assert rows["share_of_bound"].endswith("| 0.812 | >= 0.8 |")
    assert rows["loss_gap"].endswith("| 2.0e-07 | <= 1e-05 |")
    assert rows["prediction_error"].endswith("| not measured | <= 0.15 |")
    assert page.render(json.loads((tmp_path / "bigger.json").read_text())) == text


def test_page_is_written_from_its_figures() -> None:
    if (page.FOLDER / "bigger.json").exists():
        figures = json.loads((page.FOLDER / "bigger.json").read_text(encoding="utf-8"))
        assert page.render(figures) == (page.FOLDER / "bigger.md").read_text(encoding="utf-8")
