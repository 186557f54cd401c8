"""Logs on the disk: interrupted writes, copies, replacement, and their size."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from barnraise.core.errors import ProtocolError
from barnraise.history import log_file
from barnraise.history.entries import LogHead, MachineSample, NoteEntry, RunEnd, StepBatch
from barnraise.history.log_file import (
    RunLogCopy,
    RunLogWriter,
    has_end,
    log_path,
    read_entries,
    read_head,
    read_part,
)
from barnraise.history.log_format import encode_frames, first_frame, whole_frames
from benchmarks.invented_run import DESK, MAC, RUN, step_entries

_HEAD = LogHead(RUN, DESK, "agent", bytes(16), 1.0)


def _note(number: int, size: int = 10) -> NoteEntry:
    return NoteEntry(float(number), "x" * size)


def _times(path: Path) -> list[float]:
    return [entry.at for entry in read_entries(path) if isinstance(entry, NoteEntry)]


def _copy_all(source: Path, copy: RunLogCopy) -> int:
    parts = 1
    while copy.add(read_part(source, copy.identity, copy.size)):
        parts += 1
    return parts


def test_writer_truncates_an_interrupted_write_and_goes_on(tmp_path: Path) -> None:
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(1)])
    writer.append([_note(2)])
    writer.close()
    os.truncate(path, path.stat().st_size - 3)
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(3)])
    writer.close()
    assert _times(path) == [1.0, 3.0]


def test_zeros_that_a_power_cut_left_are_no_frames(tmp_path: Path) -> None:
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(1)])
    writer.close()
    whole = path.read_bytes()
    data = encode_frames([_note(1)])
    assert whole_frames(data + bytes(4096)) == len(data)
    assert first_frame(bytes(4096)) == 0
    path.write_bytes(whole + bytes(4096))
    assert _times(path) == [1.0]
    RunLogCopy(path, RUN, DESK)
    assert path.read_bytes() == whole
    path.write_bytes(whole + bytes(4096))
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(2)])
    writer.close()
    assert _times(path) == [1.0, 2.0]


def test_copy_starts_again_when_a_power_cut_took_frames_that_it_has(tmp_path: Path) -> None:
    path, target = log_path(tmp_path / "a", RUN, DESK), log_path(tmp_path / "b", RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(1)])
    size = writer.size
    writer.append([_note(2), _note(3)])
    writer.close()
    copy = RunLogCopy(target, RUN, DESK)
    _copy_all(path, copy)
    os.truncate(path, size)
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(number) for number in range(4, 20)])
    assert writer.size > copy.size
    _copy_all(path, copy)
    assert target.read_bytes() == path.read_bytes()


def test_copy_leaves_out_an_unfinished_frame_until_it_is_whole(tmp_path: Path) -> None:
    path, target = log_path(tmp_path / "a", RUN, DESK), log_path(tmp_path / "b", RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(1)])
    writer.append([_note(2)])
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 3)
    copy = RunLogCopy(target, RUN, DESK)
    _copy_all(path, copy)
    assert _times(target) == [1.0]
    path.write_bytes(whole)
    _copy_all(path, copy)
    assert target.read_bytes() == whole


def test_copy_continues_in_another_process(tmp_path: Path) -> None:
    path, target = log_path(tmp_path / "a", RUN, DESK), log_path(tmp_path / "b", RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    for number in range(20):
        writer.append([_note(number, 3000) for _ in range(10)])
        _copy_all(path, RunLogCopy(target, RUN, DESK))
    assert target.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("shrunk", [False, True])
def test_copy_starts_again_when_the_log_was_replaced(tmp_path: Path, shrunk: bool) -> None:
    path, target = log_path(tmp_path / "a", RUN, DESK), log_path(tmp_path / "b", RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(1)])
    size = path.stat().st_size
    for number in range(2, 200):
        writer.append([_note(number, 3000)])
    copy = RunLogCopy(target, RUN, DESK)
    assert _copy_all(path, copy) > 1
    if shrunk:
        os.truncate(path, size)
    else:
        path.unlink()
        RunLogWriter(path, _HEAD).append([_note(number, 2000) for number in range(300)])
    _copy_all(path, copy)
    assert target.read_bytes() == path.read_bytes()


def test_copy_rejects_the_log_of_another_machine(tmp_path: Path) -> None:
    path = log_path(tmp_path / "a", RUN, MAC)
    RunLogWriter(path, LogHead(RUN, MAC, "agent", bytes(16), 1.0)).append([_note(1)])
    copy = RunLogCopy(log_path(tmp_path / "b", RUN, DESK), RUN, DESK)
    with pytest.raises(ProtocolError, match="does not begin with the head"):
        copy.add(read_part(path, b"", 0))


def test_log_stays_below_its_limit_and_keeps_its_events(tmp_path: Path) -> None:
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, _HEAD, max_bytes=60_000)
    for entry in step_entries(rows=3):
        writer.append([entry, _note(1, 5)])
        assert path.stat().st_size <= 60_000
    entries = read_entries(path)
    assert sum(isinstance(entry, NoteEntry) for entry in entries) == len(step_entries(rows=3))
    covered = [step for e in entries if isinstance(e, StepBatch) for step in range(e.first, e.end)]
    assert sorted(covered) == list(range(600))


@pytest.mark.parametrize("can_truncate", [True, False])
def test_part_of_a_frame_that_a_full_disk_took_does_not_spoil_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_truncate: bool
) -> None:
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    writer.append([_note(1)])

    def write_a_part(file: int, data: bytes) -> None:
        os.write(file, data[:7])
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log_file, "write_all", write_a_part)
        if not can_truncate:
            patch.setattr(os, "ftruncate", lambda file, size: (_ for _ in ()).throw(OSError(5, "error")))
        for _ in range(2):
            with pytest.raises(OSError, match=r"no space|error"):
                writer.append([_note(2)])
    writer.append([_note(3)])
    writer.close()
    assert _times(path) == [1.0, 3.0]


def test_entry_beyond_its_bounds_is_left_out(tmp_path: Path) -> None:
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    broken_sensor = MachineSample(1.0, DESK, temperature_c=65_535.0)
    writer.append([_note(1), broken_sensor, StepBatch(1, 0, 1.0, (1 << 70,), (1,))])
    writer.append([broken_sensor])
    writer.append([_note(2)])
    assert _times(path) == [1.0, 2.0]


def test_log_with_a_frame_that_holds_something_else_still_becomes_smaller(tmp_path: Path) -> None:
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, _HEAD, max_bytes=20_000)
    writer.append([_note(1)])
    with open(path, "ab") as file:  # of an earlier version, without that check
        data = encode_frames([MachineSample(1.0, DESK, temperature_c=65_535.0)])
        file.write(data)
    writer._size += len(data)
    for number in range(2, 60):
        writer.append([_note(number, 1000)])
    assert 1.0 not in _times(path)
    assert writer.size <= 20_000


def test_file_is_later_than_the_one_before_also_if_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    before = read_head(path)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    writer._shrink()
    after = read_head(path)
    assert before is not None
    assert after is not None
    assert after.at > before.at
    assert after.identity != before.identity


def test_end_of_a_run_is_found_in_its_log(tmp_path: Path) -> None:
    path = log_path(tmp_path, RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    for number in range(100):
        writer.append([_note(number, 3000)])
    assert not has_end(path)
    writer.append([RunEnd(9.0, 0, "finished"), _note(100)])
    assert has_end(path)


def test_copy_that_is_not_complete_does_not_replace_the_one_before(tmp_path: Path) -> None:
    path, target = log_path(tmp_path / "a", RUN, DESK), log_path(tmp_path / "b", RUN, DESK)
    writer = RunLogWriter(path, _HEAD)
    for number in range(100):
        writer.append([_note(number, 1000)])
    copy = RunLogCopy(target, RUN, DESK)
    _copy_all(path, copy)
    before = target.read_bytes()
    writer._shrink()
    head, *_ = (read_part(path, b"", 0),)
    short = head._replace(data=head.data[:5000])
    assert copy.add(short)
    empty = short._replace(offset=copy.size, data=b"")
    assert not copy.add(empty), "the other machine sends no more"
    assert target.read_bytes() == before
    _copy_all(path, copy)
    assert target.read_bytes() == path.read_bytes()
