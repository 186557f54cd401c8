"""Knowledge and traces of a run on a guest before its user agrees."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.runs import preparation as preparations
from barnraise.agent.runs.consent import (
    agreed_to_sandbox,
    describe_offer,
    end_agreement,
    has_agreed,
    note_agreement,
    summarize,
)
from barnraise.agent.runs.executor import RunExecutor
from barnraise.agent.runs.registry import RunRegistry
from barnraise.agent.runs.variables import VariableKeeper
from barnraise.agent_client.run_options import DataSet, RunOptions, RunProgram
from barnraise.artifacts import pack
from barnraise.artifacts.store.manifest import FileEntry, make_manifest
from barnraise.core.config import Settings
from barnraise.core.errors import RunError
from barnraise.identity import NodeId
from barnraise.runs.record import RunSpec, sign_spec
from tests.unit.agent.test_artifact_service import LIMITS, Host, Network
from tests.unit.runs.control.test_lifecycle import KEY, B, order

GUEST = NodeId(B)


def spec_of(folder: bytes, **options: Any) -> RunSpec:
    program = RunProgram(
        command=("train.py",),
        folder=folder,
        data=(DataSet("mnist", bytes(32), "", 4, 11), DataSet("own", path="/data")),
        packages=3,
        settings=(("BARNRAISE_SYNC", "auto"),),
    )
    return replace(order(), program=program, options=RunOptions(**options), nodes=(KEY.id.raw, B))


def test_summarize_shows_few_of_many_files_and_the_script_first() -> None:
    entries = [FileEntry(f"data/{number:05}", 5, False, (bytes(32),)) for number in range(20_000)]
    tops = [FileEntry(name, 1, False, (bytes(32),)) for name in ("train.py", "requirements.txt")]
    spec = spec_of(bytes(32))
    folder = summarize(make_manifest([*entries, *tops]), spec)
    assert folder.files[0] == ("train.py", 1)
    assert len(folder.files) == 500
    assert (folder.file_count, folder.total_bytes) == (20_002, 100_002)
    assert folder.source == "requirements.txt"


@pytest.mark.parametrize("options", [{"environment": "agent"}, {"container": "image"}])
def test_summarize_names_no_packages_where_none_are_installed(options: dict[str, str]) -> None:
    tops = [FileEntry(name, 1, False, (bytes(32),)) for name in ("train.py", "requirements.txt")]
    assert summarize(make_manifest(tops), spec_of(bytes(32), **options)).source == ""


def test_describe_offer_names_variables_data_image_and_packages() -> None:
    spec = spec_of(bytes(32), container="image")
    record = sign_spec(spec, KEY)
    offer = describe_offer(record, spec, summarize(make_manifest([]), spec), {"LD_PRELOAD": "/x"})
    assert offer.variables == (("BARNRAISE_SYNC", "auto"), ("LD_PRELOAD", "/x"))
    assert [(row.name, row.path, row.files, row.bytes) for row in offer.data] == [
        ("mnist", "", 4, 11),
        ("own", "/data", 0, 0),
    ]
    assert (offer.image, offer.package_count, offer.by_id) == ("image", 3, KEY.id.short)
    assert len(offer.order) == 64


def test_agreement_ends_with_the_run(tmp_path: Path) -> None:
    assert not has_agreed(tmp_path)
    note_agreement(tmp_path, is_sandboxed=True)
    assert has_agreed(tmp_path)
    end_agreement(tmp_path)
    end_agreement(tmp_path)
    assert not has_agreed(tmp_path)


def test_agreement_to_no_sandbox_is_remembered_only_if_it_was_said(tmp_path: Path) -> None:
    assert agreed_to_sandbox(tmp_path), "what is unknown is confined"
    note_agreement(tmp_path, is_sandboxed=True)
    assert agreed_to_sandbox(tmp_path)
    note_agreement(tmp_path, is_sandboxed=False)
    assert not agreed_to_sandbox(tmp_path)


class Guest:
    """A guest's agent as its executors see it."""

    def __init__(self, directory: Path) -> None:
        self.me, self.incarnation, self.storage, self.log = GUEST, bytes(16), self, self
        self.directory, self.settings = directory, Settings()
        self.limits = SimpleNamespace(reason_against=lambda starter: "")

    def role(self, node: NodeId) -> str:
        return "guest" if node == GUEST else "owner"

    def keep_run(self, name: str, value: bytes) -> None:
        return

    def linked_nodes(self) -> list[NodeId]:
        return []

    def machine_of(self, node: NodeId) -> None:
        return None

    def name_of(self, node: NodeId) -> str:
        return node.short


def files_in(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*") if path.is_file()]


def asked(tmp_path: Path, check: Callable[[RunExecutor, Host], Awaitable[None]], *, waiting: int = 0) -> None:
    """Let a guest's executor come to its question about a folder of 3 MiB."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_bytes(b"x" * (3 << 20))

    async def main() -> None:
        network = Network()
        owner, guest = (Host(network, node, tmp_path / "stores") for node in (KEY.id, GUEST))
        packed = pack(source, owner.store, LIMITS)
        owner.artifacts.allow(packed.id, [GUEST])
        context: Any = Guest(tmp_path / "state")
        registry = RunRegistry(context)
        for number in range(waiting + 1):
            spec = replace(spec_of(packed.id), run=f"train-{number}")
            assert registry.apply(sign_spec(spec, KEY))
        tasks = []
        try:
            for entry in list(registry.runs.values()):
                keeper = VariableKeeper(context, registry)
                executor = RunExecutor(context, registry, guest.artifacts, guest.store, keeper, entry)
                executor.home.mkdir(parents=True)
                tasks.append(asyncio.ensure_future(executor.preparation._ask_user()))
                deadline = asyncio.get_running_loop().time() + 20
                while executor.preparation.consent is None and not tasks[-1].done():
                    assert asyncio.get_running_loop().time() < deadline
                    await asyncio.sleep(0.01)
            if tasks[-1].done():
                tasks.pop().result()
            await check(executor, guest)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await owner.artifacts.close()
            await guest.artifacts.close()

    asyncio.run(main())


def test_nothing_is_on_disk_before_the_user_agrees(tmp_path: Path) -> None:
    async def check(executor: RunExecutor, guest: Host) -> None:
        assert executor.preparation.offered is not None
        assert executor.preparation.offered.files == (("train.py", 3 << 20),)
        assert files_in(guest.store.directory) == []
        assert files_in(tmp_path / "state") == []
        assert sum(guest.network.sent.values()) < 10_000, "only the list was sent"

    asked(tmp_path, check)


def test_runs_that_wait_for_an_answer_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations, "MAX_WAITING", 3)

    async def check(executor: RunExecutor, guest: Host) -> None:
        raise AssertionError("the fourth run was asked about")

    with pytest.raises(RunError, match="3 other runs wait for the answer of its user"):
        asked(tmp_path, check, waiting=3)
