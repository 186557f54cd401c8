"""The table and the JSON of `barnraise audit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from barnraise.cli.hub.directories import top_folder
from barnraise.cli.machine import audit
from barnraise.core.config import load_settings
from barnraise.core.errors import ConfigError
from barnraise.core.logs.audit_entry import make_entry
from barnraise.core.logs.audit_log import AuditLog

_NOW = 1_800_000_000.0


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    for hours in range(5, 0, -1):
        log = AuditLog(tmp_path, now=lambda hours=hours: _NOW - hours * 3600)
        log.write("run-started", subject=f"train-{hours}", by="mac (ab)", detail="x.py", digest="cd" * 32)
    monkeypatch.setattr(audit.time, "time", lambda: _NOW)
    return tmp_path


def test_table_has_the_newest_last_with_the_digest(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.run(since="", limit=2, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["TIME", "EVENT", "WHAT", "DETAIL"]
    assert [line.split()[4] for line in lines[1:] if "run started" in line] == ["train-2", "train-1"]
    assert "x.py; by mac (ab); order cdcdcdcdcdcd" in " ".join(" ".join(lines[1:]).split())
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("since", "count"), [("150min", 2), ("3.5h", 3), ("2000-01-01", 5), ("1min", 0)])
def test_since_takes_a_time_or_a_date(
    state: Path, capsys: pytest.CaptureFixture[str], since: str, count: int
) -> None:
    audit.run(since=since, limit=0, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (len(shown["entries"]), shown["kept"]) == (count, 5)


def test_empty_log_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.describe([], 0) == "No line matches; audit.log has 0 lines."


def test_since_that_is_no_time_is_an_error() -> None:
    with pytest.raises(ConfigError, match="neither a time"):
        audit.parse_since("yesterday", _NOW)


def test_texts_of_peers_cannot_command_the_terminal() -> None:
    """Tries a line that another program wrote into the file, with an escape sequence."""
    entry = make_entry(_NOW, "run-ended", subject="x")
    forged = audit.describe([type(entry)(at=entry.at, event="run-ended", detail="\x1b[2Jhidden")], 1)
    assert "\x1b" not in forged


def test_entries_of_hubs_are_shown_among_those_of_the_machine(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = top_folder(load_settings()) / "friends"
    hub.mkdir(parents=True)
    (hub / "hub.db").touch()
    AuditLog(hub, now=lambda: _NOW - 2.5 * 3600).write("invite-used", subject="bob")
    audit.run(since="", limit=3, as_json=True)
    subjects = [entry["subject"] for entry in json.loads(capsys.readouterr().out)["entries"]]
    assert subjects == ["bob", "train-2", "train-1"]
