"""Command ``barnraise report`` on the records that a machine keeps, without an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.cli.history import html_report
from barnraise.core.errors import ConfigError, RunError
from barnraise.history.entries import LogHead
from barnraise.history.log_file import RunLogWriter, log_path
from benchmarks.invented_run import DESK, RUN, example_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of a machine that keeps the record of the invented run."""
    state = tmp_path / "state"
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(state))
    head, *entries = example_run()
    assert isinstance(head, LogHead)
    writer = RunLogWriter(log_path(state, RUN, DESK), head)
    writer.append(entries)
    writer.close()
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def test_report_is_written_and_its_place_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert html_report.write(run="train", into=None, price=None) == 0
    text = (folder / f"{RUN}.html").read_text(encoding="utf-8")
    assert "Finished after 600 steps" in text
    assert "so there is no estimate of the cost" in text
    assert f"report of run {RUN}: {RUN}.html (" in capsys.readouterr().out


def test_newest_run_and_the_price_of_the_settings_are_the_defaults(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARNRAISE_RUNS_ENERGY_PRICE", "1 CHF")
    assert html_report.write(run=None, into=folder / "mine.html", price=None) == 0
    text = (folder / "mine.html").read_text(encoding="utf-8")
    assert "Estimated cost: about 0.11 CHF" in text
    html_report.write(run=None, into=folder / "mine.html", price="2 USD")
    assert "0.22 USD" in (folder / "mine.html").read_text(encoding="utf-8")


def test_wrong_price_run_or_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="price"):
        html_report.write(run=RUN, into=None, price="cheap")
    with pytest.raises(RunError, match="no run"):
        html_report.write(run="nothing", into=None, price=None)
    with pytest.raises(RunError, match="cannot be written"):
        html_report.write(run=RUN, into=folder / "none" / "r.html", price=None)
    assert list(folder.iterdir()) == []


def test_machine_without_records_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    with pytest.raises(RunError, match="keeps no record"):
        html_report.write(run=None, into=None, price=None)
