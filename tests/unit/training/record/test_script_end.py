"""End of a script in its record: what it gave `sys.exit`, or the error that nothing has caught."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from barnraise.history.entries import RunEnd
from barnraise.history.log_file import log_path, read_entries
from barnraise.training.record.script_end import ScriptEnd
from barnraise.training.record.sinks import FileSink


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set back what a script changes."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)


@pytest.mark.parametrize(
    ("status", "code"), [(None, 0), (0, 0), (3, 3), (256, 0), (-1, 255), (True, 1), ("no data", 1)]
)
def test_status_of_the_script_is_its_code(status: int | str | None, code: int) -> None:
    before = sys.exit
    end = ScriptEnd()
    with pytest.raises(SystemExit) as raised:
        sys.exit(status)
    assert raised.value.code == status
    sentence = f"the script exited with code {code}" if code else ""
    assert end.entry(5.0) == RunEnd(5.0, code, sentence)
    assert sys.exit is before


def test_record_of_a_script_has_its_code(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    with pytest.raises(SystemExit):
        sys.exit(2)
    sink.close()
    (end,) = [entry for entry in read_entries(log_path(tmp_path, sink.run, b"")) if isinstance(entry, RunEnd)]
    assert end.code == 2


@pytest.mark.parametrize("closed", [False, True])
def test_thousands_of_records_in_one_process_leave_exit_as_it_is(closed: bool) -> None:
    """A notebook may open many records and leave them open; the stack of calls must not grow with them."""
    before = sys.exit
    ends = [ScriptEnd() for _ in range(3000)]
    if closed:
        for end in ends:
            end.entry(5.0)
        assert sys.exit is before
    with pytest.raises(SystemExit):
        sys.exit(7)
    assert {end.entry(5.0).code for end in ends} == ({0} if closed else {7})


def test_exit_that_another_package_replaced_is_still_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    end = ScriptEnd()
    ours = sys.exit
    monkeypatch.setattr(sys, "exit", lambda status=None: ours(status))
    end.entry(5.0)
    later = ScriptEnd()
    with pytest.raises(SystemExit):
        sys.exit(9)
    assert later.entry(5.0).code == 9


def test_exit_of_a_thread_is_not_that_of_the_script() -> None:
    end = ScriptEnd()

    def leave() -> None:
        with suppress(SystemExit):
            sys.exit(4)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert end.entry(5.0).code == 0


def test_only_errors_that_end_the_script_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("of an earlier cell"))
    assert ScriptEnd().entry(5.0).code == 0
    end = ScriptEnd()
    monkeypatch.setattr(sys, "last_value", KeyError("x"))
    assert end.entry(5.0) == RunEnd(5.0, 1, "the script failed: KeyError")
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt())
    assert end.entry(5.0).code == 130
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert end.entry(5.0).code == 0, "an interactive session goes on"
