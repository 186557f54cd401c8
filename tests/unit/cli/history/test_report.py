"""The report of a run, and the table of what differs between runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from barnraise.cli.history import compare, listing, report
from barnraise.history.entries import Entry, LogHead, RunStart
from barnraise.history.log_file import RunLogWriter, log_path
from barnraise.history.view_builder import build_view
from tests.unit.history.example_run import DESK, MAC, RUN, example_run


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a state directory with the record of the example, in the logs of two machines."""
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    _write(tmp_path, RUN, DESK, example_run()[::2])
    _write(tmp_path, RUN, MAC, example_run())
    return tmp_path


def _write(state: Path, run: str, node: bytes, entries: list[Entry]) -> None:
    writer = RunLogWriter(log_path(state, run, node), LogHead(run, node, "agent", bytes(16), 1.0))
    writer.append(entries)
    writer.close()


def test_history_tells_what_happened(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.show(run="train", as_json=False) == 0
    text = capsys.readouterr().out
    for part in (
        "finished after 600 steps in",
        "nas is paused: its link slows the others",
        "mac died: its worker was killed by signal 9",
        "checkpoint of step 400 on desk, nas",
        "new plan: pair-exact",
    ):
        assert part in " ".join(text.split()), part
    report.show(run=RUN, as_json=True)
    assert json.loads(capsys.readouterr().out)["step"] == 600


def test_list_has_a_line_for_each_run(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listing.show(as_json=True) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["run"], run["steps"], run["machines"]) == (RUN, 600, ["desk", "mac", "nas"])
    listing.show(as_json=False)
    assert RUN in capsys.readouterr().out


def test_comparison_shows_only_what_differs(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = [
        replace(entry, options=(("copies", "3"),)) if isinstance(entry, RunStart) else entry
        for entry in example_run(500)
    ]
    _write(state, "train-p2wq", DESK, other)
    assert compare.show(runs=(RUN, "train-p2wq"), as_json=True) == 0
    differs = json.loads(capsys.readouterr().out)["differs"]
    assert {"--copies", "steps", "last loss", "state", "time"} <= set(differs)
    assert not {"command", "machines", "python", "batch"} & set(differs)


def test_damaged_log_is_left_out(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log_path(state, RUN, DESK)
    path.write_bytes(path.read_bytes()[:300] + b"\0" * 50)
    report.show(run=RUN, as_json=True)
    assert json.loads(capsys.readouterr().out)["step"] == 600


def test_facts_of_a_run_without_steps_are_few() -> None:
    facts = compare.facts_of(build_view(example_run(0), run=RUN))
    assert facts["steps"] == "0"
    assert not any(name.startswith("last") for name in facts)
