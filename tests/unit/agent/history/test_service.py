"""The agent removes the record of a run that has ended, and of no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent.history.service import HistoryService
from barnraise.agent_client.history.requests import HistoryRemoveRequest
from barnraise.core.config import Settings
from barnraise.core.errors import RunError
from barnraise.history.entries import LogHead, NoteEntry
from barnraise.history.log_file import RunLogWriter, log_path, logs_of
from barnraise.identity import NodeId
from barnraise.membership.storage import MembershipStorage
from benchmarks.invented_run import DESK, MAC, RUN


def _service(directory: Path, runs: dict[str, Any]) -> HistoryService:
    storage = MembershipStorage(directory / "state")
    log = SimpleNamespace(cluster=b"c" * 32)
    context: Any = SimpleNamespace(
        me=NodeId(DESK), directory=directory, storage=storage, settings=Settings(), log=log
    )
    registry: Any = SimpleNamespace(runs=runs)
    return HistoryService(context, registry)


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
