"""Files of a run whose machines do not answer for a while."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.agent.artifact_service import TransferProgress
from barnraise.agent.runs import preparation as preparations
from barnraise.agent.runs.preparation import RunPreparation
from barnraise.artifacts import FolderLimits
from barnraise.artifacts.store.manifest import FolderManifest
from barnraise.core.config import Settings
from barnraise.core.errors import ShippingError
from barnraise.core.flow.backoff import SteppedBackoff
from barnraise.identity import NodeId
from tests.unit.runs.control.test_lifecycle import KEY, NAMES, A, order

LIMITS = FolderLimits(1 << 30, 10)
FILES = FolderManifest(())
SOURCE = NodeId(A)


def silence() -> ShippingError:
    error = ShippingError("no piece received for 120 s; waiting for mac")
    error.is_silence = True
    return error


class Transfers:
    """Fetches that end in these ways, one after the other."""

    def __init__(self, *ends: ShippingError | FolderManifest) -> None:
        self.ends = list(ends)

    async def fetch(self, *arguments: Any) -> FolderManifest:
        progress = arguments[4]
        progress(TransferProgress(10 << 20, 99 << 20, (SOURCE,)))
        end = self.ends.pop(0)
        if isinstance(end, ShippingError):
            raise end
        progress(TransferProgress(20 << 20, 99 << 20, (SOURCE,)))
        return end


def prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfers: Transfers, **spec: Any
) -> list[tuple[str, int]]:
    """Fetch the files of a run; return the words that were reported, and the size that people saw then."""
    monkeypatch.setattr(preparations, "_FETCH_BACKOFF", SteppedBackoff((0.0,)))
    monkeypatch.setattr(preparations, "_REPORT_S", -1.0)
    reports: list[tuple[str, int]] = []

    async def play() -> None:
        context: Any = SimpleNamespace(
            me=KEY.id,
            settings=Settings(),
            directory=tmp_path,
            log=SimpleNamespace(role=lambda node: "owner", owners=(SOURCE,)),
            name_of=lambda node: NAMES[node.raw],
        )
        entry: Any = SimpleNamespace(run="train-abcd", spec=order(**spec))
        unused: Any = SimpleNamespace()
        artifacts: Any = transfers
        preparation = RunPreparation(
            context,
            unused,
            artifacts,
            unused,
            unused,
            entry,
            report=lambda stage, words: reports.append((words, preparation.all_bytes >> 20)),
        )
        assert await preparation._fetch(bytes(32), LIMITS) == FILES

    asyncio.run(play())
    return reports


def test_fetch_without_an_answer_is_repeated_and_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = ("no piece received for 120 s; waiting for mac; it tries again", 0)
    usual = ("waiting for pieces from mac", 99)
    reports = prepared(tmp_path, monkeypatch, Transfers(silence(), silence(), FILES))
    assert reports == [usual, silent, silent, silent, silent, usual]


def test_other_errors_of_a_fetch_and_attempts_of_a_job_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ShippingError, match="the disk is full"):
        prepared(tmp_path, monkeypatch, Transfers(ShippingError("the disk is full"), FILES))
    with pytest.raises(ShippingError, match="waiting for mac"):
        prepared(tmp_path, monkeypatch, Transfers(silence(), FILES), job=b"a job")
