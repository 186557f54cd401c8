"""Reports of an executor about the results of its run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from barnraise.agent.runs.executor import RunExecutor
from barnraise.agent.runs.registry import RunRegistry
from barnraise.agent.runs.variables import VariableKeeper
from barnraise.artifacts import ArtifactStore
from barnraise.artifacts.store.manifest import FolderManifest
from barnraise.core.config import RunSettings, Settings
from barnraise.runs.record import NodeReport, WorkerSlot, WorkerState, sign_spec
from tests.unit.agent.runs.test_registry import FakeContext
from tests.unit.runs.control.test_lifecycle import KEY, A, order


def executor_of(tmp_path: Path, settings: Settings) -> tuple[RunExecutor, RunRegistry]:
    """Return the executor of a run on one machine."""
    context: Any = FakeContext("owner")
    context.directory, context.key, context.settings = tmp_path, KEY, settings
    context.limits = SimpleNamespace(reason_against=lambda starter: "")
    context.machine_of = lambda node: None
    context.report_event = lambda text: None
    registry = RunRegistry(context)
    registry.apply(replace(sign_spec(order(), KEY), slots=(WorkerSlot(A, 0, "cpu"),)))
    entry = registry.runs["train-abcd"]
    store = ArtifactStore(tmp_path / "store")
    keeper = VariableKeeper(context, registry)
    service: Any = SimpleNamespace()
    return RunExecutor(context, registry, service, store, keeper, entry), registry


def packed_report(tmp_path: Path, most_bytes: int) -> NodeReport:
    """Return the report of a machine whose run wrote an adapter and a checkpoint of a Trainer."""

    async def play() -> NodeReport:
        executor, registry = executor_of(tmp_path, Settings(runs=RunSettings(most_bytes=most_bytes)))
        executor.preparation.manifest = FolderManifest(())
        for name, size in {"adapter/model": 500, "out/checkpoint-10/model": 2000}.items():
            (executor.folder / name).parent.mkdir(parents=True)
            (executor.folder / name).write_bytes(bytes(size))
        await executor._pack_results()
        return registry.runs["train-abcd"].reports[A]

    return asyncio.run(play())


def test_results_without_checkpoints_come_back_and_the_report_says_so(tmp_path: Path) -> None:
    report = packed_report(tmp_path, 1000)
    assert report.collected
    assert report.results
    folder = tmp_path / "runs" / "train-abcd" / "folder"
    assert report.words.startswith("the results lack out/checkpoint-10 (1.95 KiB)")
    assert report.words.endswith(f"What they lack stays in {folder} on mac")


def test_results_that_stay_name_machine_folder_and_setting(tmp_path: Path) -> None:
    report = packed_report(tmp_path, 100)
    assert (report.collected, report.results) == (True, b"")
    folder = tmp_path / "runs" / "train-abcd" / "folder"
    assert report.words.startswith(f"the results stay in {folder} on mac: they have 2.44 KiB")
    assert "`runs.most_bytes` allows 100 B" in report.words
    assert "barnraise export RUN FOLDER" in report.words


def test_complete_results_need_no_words(tmp_path: Path) -> None:
    assert packed_report(tmp_path, 1 << 20).words == ""


def test_refused_worker_is_not_started_again(tmp_path: Path) -> None:
    """Another failure of a joining worker is tried again."""

    async def play(tail: str) -> tuple[bool, str]:
        executor, _ = executor_of(tmp_path, Settings())
        executor._last_start = 4
        executor._exited[0, 4] = WorkerState(0, "ended", 1, 0, tail, local_rank=0, start=4)
        return executor._cannot_join(set()), executor._detail

    trace = 'Traceback (most recent call last):\n  File "train.py", line 3\n    f()\n'
    line = "barnraise.core.errors.WorkerRefused: [worker-refused] mac is refused: its lr is 1"
    assert asyncio.run(play(f"{trace}{line}\n  -> Fix it.\n")) == (
        True,
        "its worker cannot join: mac is refused: its lr is 1",
    )
    assert asyncio.run(play(f"{trace}OSError: no\n")) == (False, "")
