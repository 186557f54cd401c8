"""Entries of the audit log."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.logs.audit_entry import MAX_TEXT, decode_lines, encode_line, make_entry, newest


def test_entry_is_one_json_object_with_the_wall_time() -> None:
    entry = make_entry(1_800_000_000.25, "machine-admitted", subject="nas (ab12)", by="mac (cd34)")
    line = encode_line(entry)
    assert json.loads(line) == {
        "at": "2027-01-15T08:00:00.250+00:00",
        "event": "machine-admitted",
        "subject": "nas (ab12)",
        "by": "mac (cd34)",
    }
    assert entry.seconds == 1_800_000_000.25
    assert decode_lines(line) == [entry]


@given(st.text())
def test_texts_of_peers_stay_on_one_short_printable_line(text: str) -> None:
    """Tries names and reasons with line ends, escape sequences and marks of direction."""
    entry = make_entry(0.0, "run-ended", subject=text, detail=text * 50)
    line = encode_line(entry)
    assert line.count(b"\n") == 1
    assert decode_lines(line) == [entry]
    assert entry.subject.isprintable()
    assert len(entry.detail) <= MAX_TEXT


def test_lines_that_were_damaged_are_left_out() -> None:
    good = make_entry(1.0, "psk-made")
    lines = encode_line(good) + b'{"at": "x", "event": "no-such"}\n\xff\xfe\n{"at"\n' + encode_line(good)[:9]
    assert decode_lines(lines) == [good]


def test_newest_entries_since_a_time_are_chosen() -> None:
    entries = [make_entry(float(second), "code-opened") for second in range(10)]
    assert newest(entries, since=4.0) == entries[4:]
    assert newest(entries, limit=2) == entries[8:]
    assert newest(entries, since=4.0, limit=20) == entries[4:]
    assert newest(entries) == entries
