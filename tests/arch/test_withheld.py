"""A failure counts unless the processor was withheld, and then it is shown, not hidden."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.withheld import LONGEST_PAUSE_S, Pauses, Ticks, Undecided, ticks

pytest_plugins = ["pytester"]

FAILING = "import pytest\n@pytest.mark.lab\ndef test_one():\n    assert 1 == 2, 'the machine was late'\n"


def outcome(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, share: float) -> pytest.RunResult:
    clock = iter(range(1000))

    def fake() -> Ticks:
        now = 1000 * next(clock)
        return Ticks(now, int(share * now))

    monkeypatch.setattr("tests.withheld.ticks", fake)
    pytester.makeini("[pytest]\nmarkers = lab\naddopts = -rs")
    pytester.makepyfile(FAILING)
    return pytester.inline_run(plugins=[Undecided()])


@pytest.mark.parametrize(("share", "failed"), [(0.0, 1), (0.29, 1), (0.31, 0), (0.9, 0)])
def test_only_a_failure_without_processor_is_undecided(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, share: float, failed: int
) -> None:
    found = outcome(pytester, monkeypatch, share)
    passed, skipped, failures = found.listoutcomes()
    assert (len(passed), len(skipped), len(failures)) == (0, 1 - failed, failed)
    if skipped:
        assert "the machine was late" in str(skipped[0].longrepr)


def test_many_undecided_tests_are_a_failure(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = Undecided()
    clock = iter(range(10000))

    def fake() -> Ticks:
        now = 1000 * next(clock)
        return Ticks(now, now // 2)

    monkeypatch.setattr("tests.withheld.ticks", fake)
    pytester.makeini("[pytest]\nmarkers = lab")
    tests = "".join(f"@pytest.mark.lab\ndef test_{one}():\n    assert {one} > 3\n" for one in range(8))
    pytester.makepyfile("import pytest\n" + tests)
    assert pytester.inline_run(plugins=[plugin]).ret == pytest.ExitCode.TESTS_FAILED
    assert len(plugin.undecided) == 4


def test_this_systems_figures_can_be_read(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 20 5000 7 3 2 40 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert ticks(stat) == Ticks(175, 40)
    assert ticks(tmp_path / "none") == Ticks(0, 0)


def test_a_pause_of_everything_makes_a_failure_undecided(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Paused(Pauses):
        def __init__(self) -> None:
            return

        def longest(self, since: float) -> float:
            return 4.0

        def close(self) -> None:
            return

    monkeypatch.setattr("tests.withheld.ticks", lambda: Ticks(0, 0))
    pytester.makeini("[pytest]\nmarkers = lab\naddopts = -rs")
    pytester.makepyfile(FAILING)
    passed, skipped, failed = pytester.inline_run(plugins=[Undecided(Paused())]).listoutcomes()
    assert (len(passed), len(skipped), len(failed)) == (0, 1, 0)
    assert "stood still for 4.0 s" in str(skipped[0].longrepr)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system stops no process")
def test_a_process_that_was_stopped_is_noticed() -> None:
    pauses, began = Pauses(), time.monotonic()
    try:
        watcher, byte = pauses._process.pid, pauses._file.with_suffix(".byte")
        deadline = time.monotonic() + 60.0
        while not (byte.exists() and byte.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        # It may be that this machine really stood still.
        assert not 0.0 < pauses.longest(began) < LONGEST_PAUSE_S
        stopped = time.monotonic()
        os.kill(watcher, signal.SIGSTOP)
        time.sleep(LONGEST_PAUSE_S + 0.5)
        os.kill(watcher, signal.SIGCONT)
        while not pauses.longest(stopped) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert pauses.longest(stopped) > LONGEST_PAUSE_S
        assert pauses.longest(time.monotonic()) == 0.0
    finally:
        pauses.close()
