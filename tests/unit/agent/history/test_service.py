"""The agent keeps what a full disk does not take, and removes only records of runs that have ended."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.history.service import HistoryService
from barnraise.agent_client.history.requests import HistoryRemoveRequest
from barnraise.core.config import Settings
from barnraise.core.errors import RunError
from barnraise.history.entries import LogHead, NoteEntry, RunEnd
from barnraise.history.log_file import RunLogWriter, log_path, logs_of, read_entries
from barnraise.identity import NodeId
from barnraise.membership.storage import MembershipStorage
from barnraise.runs.record import RunOutcome, RunRecord, WorkerSlot
from benchmarks.invented_run import DESK, MAC, RUN


def _service(directory: Path, runs: dict[str, Any]) -> HistoryService:
    storage = MembershipStorage(directory / "state")
    log = SimpleNamespace(cluster=b"c" * 32)
    context: Any = SimpleNamespace(
        me=NodeId(DESK), directory=directory, storage=storage, settings=Settings(), log=log
    )
    registry: Any = SimpleNamespace(runs=runs)
    return HistoryService(context, registry)


def _running() -> RunRecord:
    return RunRecord(order=b"", signature=bytes(64), phase="running", slots=(WorkerSlot(DESK, 0, "cpu", 1),))


def _write(directory: Path, run: str) -> None:
    for node in (DESK, MAC):
        writer = RunLogWriter(log_path(directory, run, node), LogHead(run, node, "agent", bytes(16), 1.0))
        writer.append([NoteEntry(1.0, "text")])
        writer.close()


def test_removal_is_remembered_after_a_restart(tmp_path: Path) -> None:
    async def remove() -> None:
        _write(tmp_path, RUN)
        service = _service(tmp_path, {RUN: SimpleNamespace(has_ended=True)})
        await service.remove(HistoryRemoveRequest((RUN,)))
        assert logs_of(tmp_path, RUN) == {}
        _write(tmp_path, RUN)  # the agent was killed before the files were removed
        again = _service(tmp_path, {})
        await again.copier.remove_named()
        assert logs_of(tmp_path, RUN) == {}

    asyncio.run(remove())


@pytest.mark.parametrize(
    ("run", "problem"), [(RUN, "has not ended"), ("other", "keeps no record of run other")]
)
def test_record_of_an_active_or_unknown_run_is_not_removed(tmp_path: Path, run: str, problem: str) -> None:
    async def remove() -> None:
        _write(tmp_path, RUN)
        service = _service(tmp_path, {RUN: SimpleNamespace(has_ended=False)})
        with pytest.raises(RunError, match=problem):
            await service.remove(HistoryRemoveRequest((run,)))
        assert len(logs_of(tmp_path, RUN)) == 2
        assert service.removals.all == ()

    asyncio.run(remove())


def _texts(directory: Path) -> list[str]:
    path = log_path(directory, RUN, DESK)
    return [entry.text for entry in read_entries(path) if isinstance(entry, NoteEntry)]


def test_events_are_written_once_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write() -> None:
        service = _service(tmp_path, {})
        service._known[RUN] = _running()
        service.record(RUN, [NoteEntry(1.0, "before")])
        with monkeypatch.context() as patch:
            patch.setattr(RunLogWriter, "append", _no_space)
            service.record(RUN, [NoteEntry(2.0, "first")])
            service.record(RUN, [NoteEntry(3.0, "second")])
            del service._known[RUN]
            await service._disk.run(lambda: service._close(RUN))  # the run ends meanwhile
        await service._disk.run(service._write_again)
        assert _texts(tmp_path) == ["before", "first", "second"]
        assert service._writers == {}

    asyncio.run(write())


def test_log_of_a_full_disk_keeps_a_limited_number_of_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write() -> None:
        service = _service(tmp_path, {})
        service._known[RUN] = _running()
        with monkeypatch.context() as patch:
            patch.setattr(RunLogWriter, "append", _no_space)
            for number in range(1500):
                service.record(RUN, [NoteEntry(1.0, str(number))])
            await service._disk.run(lambda: None)
        service.record(RUN, [NoteEntry(1.0, "last")])
        await service.stop()
        assert _texts(tmp_path) == [*map(str, range(500, 1500)), "last"]

    asyncio.run(write())


def _no_space(writer: RunLogWriter, entries: object) -> None:
    raise OSError(28, "no space left on device")


def test_end_of_a_run_is_written_after_the_agent_was_killed(tmp_path: Path) -> None:
    async def write() -> None:
        _write(tmp_path, RUN)
        os.utime(log_path(tmp_path, RUN, DESK), (500.0, 500.0))
        record = SimpleNamespace(outcome=RunOutcome(code=1, sentence="it failed"), provisional=0)
        spec = SimpleNamespace(nodes=(DESK, MAC))
        entry: Any = SimpleNamespace(run=RUN, record=record, spec=spec, has_ended=True)
        for _ in range(2):  # the agent starts twice
            service = _service(tmp_path, {RUN: entry})
            service.on_record(entry)
            await service.stop()
        ends = [item for item in read_entries(log_path(tmp_path, RUN, DESK)) if isinstance(item, RunEnd)]
        assert ends == [RunEnd(500.0, 1, "it failed", was_stopped=False)]
        assert not log_path(tmp_path, "removed", DESK).exists()

    asyncio.run(write())


def test_end_without_a_majority_is_written_once_it_is_confirmed(tmp_path: Path) -> None:
    outcome = RunOutcome(code=130, sentence="stopped from desk")
    running = _running()
    ended = replace(running, version=5, phase="ended", outcome=outcome, provisional=2)
    entry: Any = SimpleNamespace(run=RUN, spec=SimpleNamespace(nodes=(DESK, MAC)), reports={})

    async def write(*records: RunRecord) -> list[RunEnd]:
        service = _service(tmp_path, {RUN: entry})
        context: Any = service._context
        context.member = SimpleNamespace(view=SimpleNamespace(members=()))
        service._known[RUN] = running
        for record in records:
            entry.record, entry.has_ended = record, record.phase == "ended"
            service.on_record(entry)
        assert (RUN in service._known) == (records[-1].provisional > 0 or records[-1].phase == "running")
        await service.stop()
        content = read_entries(log_path(tmp_path, RUN, DESK))
        return [item for item in content if isinstance(item, RunEnd)]

    assert asyncio.run(write(ended)) == []
    assert asyncio.run(write(ended, replace(running, version=3))) == []
    (end,) = asyncio.run(write(ended, replace(ended, version=6, provisional=0)))
    assert (end.code, end.was_stopped) == (130, True)
    assert len(_texts(tmp_path)) == 3


def test_sample_that_comes_after_the_end_does_not_open_the_log_again(tmp_path: Path) -> None:
    async def write() -> None:
        service = _service(tmp_path, {})
        service.record(RUN, [NoteEntry(1.0, "late")])
        await service.stop()
        assert not log_path(tmp_path, RUN, DESK).exists()

    asyncio.run(write())
