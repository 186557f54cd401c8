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
from barnraise.runs.record import NodeReport, WorkerSlot, sign_spec
from tests.unit.agent.runs.test_registry import FakeContext
from tests.unit.runs.control.test_lifecycle import KEY, A, order


def packed_report(tmp_path: Path, most_bytes: int) -> NodeReport:
    """Return the report of a machine whose run wrote an adapter and a checkpoint of a Trainer."""

    async def play() -> NodeReport:
        context: Any = FakeContext("owner")
        context.directory, context.key = tmp_path, KEY
        context.settings = Settings(runs=RunSettings(most_bytes=most_bytes))
        context.limits = SimpleNamespace(reason_against=lambda starter: "")
        context.machine_of = lambda node: None
        registry = RunRegistry(context)
        record = replace(sign_spec(order(), KEY), slots=(WorkerSlot(A, 0, "cpu"),))
        registry.apply(record)
        entry = registry.runs["train-abcd"]
        store = ArtifactStore(tmp_path / "store")
        keeper = VariableKeeper(context, registry)
        executor = RunExecutor(context, registry, SimpleNamespace(), store, keeper, entry)  # type: ignore[arg-type]
        executor.preparation.manifest = FolderManifest(())
        for name, size in {"adapter/model": 500, "out/checkpoint-10/model": 2000}.items():
            (executor.folder / name).parent.mkdir(parents=True)
            (executor.folder / name).write_bytes(bytes(size))
        await executor._pack_results()
        return entry.reports[A]

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
