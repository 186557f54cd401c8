"""Checkpoint services of several agents on one loop, with real disks: search, fetch, copy and refusal."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.checkpoints import replicator, service
from barnraise.agent.checkpoints.replicator import CheckpointReplicator
from barnraise.agent.checkpoints.service import CheckpointService
from barnraise.agent.runs import messages
from barnraise.agent.runs.consent import note_agreement
from barnraise.agent.runs.registry import RunRegistry
from barnraise.agent.runs.worker_group import run_directory
from barnraise.agent_client.run_options import RunProgram
from barnraise.agent_client.run_requests import (
    FetchCheckpointRequest,
    FetchCheckpointResponse,
    NewestCheckpointRequest,
    NewestCheckpointResponse,
    SignRequest,
    SignResponse,
)
from barnraise.artifacts import FolderLimits, pack
from barnraise.artifacts.store.linked_files import entry_of
from barnraise.core.config import Settings
from barnraise.core.errors import RunError
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import Role, TrustLog
from barnraise.membership.view import PresentMember
from barnraise.runs.checkpoint_manifest import (
    KEPT,
    CheckpointManifest,
    CheckpointSignature,
    encode,
    fingerprint,
    folder_name,
    folder_step,
    sign,
)
from barnraise.runs.record import RunSpec, WorkerSlot, sign_spec
from tests.unit.agent.test_artifact_service import Host, Network

RUN = "train-abcd"
ROLES: tuple[Role, ...] = ("owner", "owner", "owner", "guest")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for answers: a slow machine would correctly be given one more copy."""
    monkeypatch.setattr(service, "_SURVEY_S", 60.0)


class Agent:
    """As much of an agent as its checkpoint service needs."""

    def __init__(self, cluster: Cluster, place: int) -> None:
        self.cluster, self.place = cluster, place
        self.key = cluster.keys[place]
        self.me = self.key.id
        self.incarnation = bytes(16)
        self.settings = Settings()
        self.directory = cluster.folder / f"h{place}"
        members = tuple(PresentMember(key.id.raw, bytes(16)) for key in cluster.keys)
        self.member: Any = SimpleNamespace(view=SimpleNamespace(members=members))
        self.storage: Any = SimpleNamespace(keep_run=lambda name, record: None)
        self.host = Host(cluster.network, self.me, self.directory / "stores", patience_s=60.0)
        self.registry = RunRegistry(self)
        self.service = CheckpointService(
            self, self.registry, self.host.artifacts, self.host.store, self.allow
        )
        self.replicator = CheckpointReplicator(self, self.registry, self.service)
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def log(self) -> TrustLog:
        return self.cluster.log

    def allow(self, run: str) -> None:
        for manifest in self.registry.runs[run].spec.program.manifests:
            self.host.artifacts.allow(manifest, self.service.grants.readers(manifest))

    def name_of(self, node: NodeId) -> str:
        return next(f"h{place}" for place, key in enumerate(self.cluster.keys) if key.id == node)

    def linked_nodes(self) -> list[NodeId]:
        return [other.me for other in self.cluster.agents if other is not self and other.is_up and self.is_up]

    is_up = True

    def send_bulk(self, node: NodeId, message: bytes) -> None:
        def deliver() -> None:
            other = next(agent for agent in self.cluster.agents if agent.me == node)
            if other.is_up and self.is_up:
                decoded: Any = messages.decode(memoryview(message)[1:])
                other.service.received(self.me, decoded)

        asyncio.get_running_loop().call_soon(deliver)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # what there is on its disk

    def place_of(self, step: int) -> Path:
        return self.directory / "runs" / RUN / "checkpoints" / folder_name(step)

    def saves(self, step: int, *, by: NodeKey | None = None, copies: int = 2, size: int = 50_000) -> None:
        """Save a checkpoint as a worker would: a concurrent reader sees all of it or nothing."""
        place = self.place_of(step).with_name(f".draft-{step}")
        place.mkdir(parents=True)
        (place / "state.safetensors").write_bytes(hashlib.shake_256(bytes([step])).digest(size))
        manifest = CheckpointManifest(
            run=RUN,
            step=step,
            generation=1,
            digest="ab" * 32,
            previous=None,
            file=entry_of(place / "state.safetensors", "x").object.hex(),
            skeleton="",
            copies=copies,
        )
        data = encode(manifest)
        (place / "manifest.json").write_bytes(data)
        seal: CheckpointSignature = sign(by or self.key, RUN, step, fingerprint(data))
        (place / "seal.json").write_bytes(encode(seal))
        place.rename(self.place_of(step))

    def holds(self, step: int) -> bool:
        signers = self.service.signers_of(RUN)
        return self.service.local.is_whole(RUN, step, signers)

    def steps(self) -> list[int]:
        folder = self.place_of(0).parent
        steps = [folder_step(path.name) for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(step for step in steps if step is not None)  # a draft is none

    def stored(self) -> int:
        """Objects and lists that its store has."""
        store = self.host.store
        return len(list(store.objects.glob("??/*"))) + len(list(store.manifests.iterdir()))

    async def bring(self, step: int) -> None:
        response = await self.service.answer(FetchCheckpointRequest(RUN, step, 60.0))
        assert response == FetchCheckpointResponse(True, response.done_bytes, response.all_bytes)  # type: ignore[union-attr]

    async def newest(self, *passing_over: tuple[str, int]) -> NewestCheckpointResponse:
        response = await self.service.answer(NewestCheckpointRequest(RUN, False, passing_over))
        assert isinstance(response, NewestCheckpointResponse)
        return response


class Cluster:
    """Three owners and a guest; a run whose order names the first, with a folder that it has."""

    def __init__(self, folder: Path, nodes: tuple[int, ...] = (0,)) -> None:
        self.folder = folder
        self.keys = [NodeKey.generate() for _ in ROLES]
        self.log = TrustLog.found(self.keys[0], "h0")
        for place, role in list(enumerate(ROLES))[1:]:
            self.log = self.log.extended(self.log.admit(self.keys[0], self.keys[place].id, role, f"h{place}"))
        self.network = Network()
        self.agents: list[Agent] = []
        self.agents += [Agent(self, place) for place in range(len(ROLES))]
        project = folder / "project"
        project.mkdir()
        (project / "train.py").write_text("print('trains')\n")
        packed = pack(project, self.agents[0].host.store, FolderLimits(1 << 20, 100))
        order = RunSpec(
            run=RUN,
            by=self.keys[0].id.raw,
            at=0.0,
            program=RunProgram(command=("train.py",), folder=packed.id),
            nodes=tuple(self.keys[place].id.raw for place in nodes),
        )
        slots = tuple(WorkerSlot(self.keys[place].id.raw, 0, "cpu", 1) for place in nodes)
        self.record = replace(sign_spec(order, self.keys[0]), slots=slots, phase="running", generation=1)
        self.folder_id = packed.id
        for agent in self.agents:
            agent.registry.apply(self.record)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(bounded())


def test_fetch_by_uninvolved_machine_gets_checkpoint_and_files(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path)
        saver, other = cluster.agents[0], cluster.agents[2]
        saver.saves(40)
        saver.saves(50, size=9 << 20)  # more than one piece
        assert await other.newest() == NewestCheckpointResponse(RUN, 50, True, ("h0",), generation=1)
        assert await other.newest((RUN, 50)) == NewestCheckpointResponse(RUN, 40, True, ("h0",), generation=1)
        before = saver.stored()
        await other.bring(50)
        for name in ("manifest.json", "state.safetensors"):
            assert (other.place_of(50) / name).read_bytes() == (saver.place_of(50) / name).read_bytes()
        assert other.holds(50)
        assert os.stat(other.place_of(50) / "state.safetensors").st_nlink == 1, "the store has let go of it"
        assert other.stored() == 0
        saver.service.grants.revoke(other.me, RUN)
        await saver.service.grants.remove_expired()
        assert saver.stored() == before, "and so has that of the machine that lent it"
        await other.service.ensure_files(other.registry.runs[RUN])
        assert other.service.local.has_files([cluster.folder_id])
        cluster.log = cluster.log.extended(cluster.log.revoke(other.key, saver.me))
        assert not saver.holds(50)
        assert other.holds(50), "what it took while the other was a member stays good"

    run(test)


@pytest.mark.parametrize(
    ("copies", "nodes", "expected"), [(1, (0,), 1), (2, (0,), 2), (2, (2,), 2), (9, (0,), 3)]
)
def test_replicator_copies_to_machines_outside_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int, nodes: tuple[int, ...], expected: int
) -> None:
    monkeypatch.setattr(replicator, "_CHECK_S", 0.02)
    monkeypatch.setattr(replicator, "_RETRY_S", 0.05)

    async def test() -> None:
        cluster = Cluster(tmp_path, nodes)
        for agent in cluster.agents:
            agent.spawn(agent.replicator.run())
        saver = cluster.agents[nodes[0]]
        for step in (10, 20, 30, 40, 50):
            saver.saves(step, copies=copies)
            for old in saver.steps()[:-KEPT]:  # as its worker would
                for file in saver.place_of(old).iterdir():
                    file.unlink()
                saver.place_of(old).rmdir()
            while sum(agent.holds(step) for agent in cluster.agents) < expected:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        assert sum(agent.holds(50) for agent in cluster.agents) == expected, "and no more"
        assert not cluster.agents[3].steps(), "a guest keeps nothing of others' runs"
        for agent in cluster.agents:
            assert len(agent.steps()) <= KEPT
            if agent.holds(50):
                assert agent.service.local.has_files([cluster.folder_id]) or nodes == (2,)
        for agent in cluster.agents:
            for task in list(agent.tasks):
                task.cancel()

    run(test)


def test_replicator_waits_for_members_that_still_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "_CHECK_S", 0.02)
    monkeypatch.setattr(replicator, "_RETRY_S", 0.05)
    monkeypatch.setattr(replicator, "_GRACE_S", 60.0)

    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, second, third, _ = cluster.agents
        for agent in cluster.agents:
            agent.spawn(agent.replicator.run())
        first.saves(10)
        await asyncio.sleep(0.3)
        assert second.steps() == third.steps() == []
        second.saves(10)
        await asyncio.sleep(0.3)
        assert third.steps() == []
        monkeypatch.setattr(replicator, "_GRACE_S", 0.0)
        first.saves(20)  # and now the second cannot write
        while not second.holds(20):
            await asyncio.sleep(0.02)
        for agent in cluster.agents:
            for task in list(agent.tasks):
                task.cancel()

    run(test)


def test_replicator_skips_machine_with_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "_CHECK_S", 0.02)
    monkeypatch.setattr(replicator, "_RETRY_S", 0.05)

    async def test() -> None:
        cluster = Cluster(tmp_path)
        full = RunError("its disk is full")

        def refuse(*_: object) -> None:
            raise full

        cluster.agents[1].service.local.keep = refuse  # type: ignore[method-assign,assignment]
        cluster.agents[0].saves(10)
        cluster.agents[0].spawn(cluster.agents[0].replicator.run())
        while not cluster.agents[2].holds(10):
            await asyncio.sleep(0.02)
        assert not cluster.agents[1].steps()
        for task in list(cluster.agents[0].tasks):
            task.cancel()

    run(test)


def test_damaged_checkpoint_is_not_granted_and_gets_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 1))
        first, second, third, _ = cluster.agents
        first.saves(10)
        second.saves(10, by=first.key)
        for agent in (first, second):
            path = agent.place_of(10) / "state.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(RunError, match="the checkpoint of step 10 is damaged"):
            await third.bring(10)
        path.write_bytes(hashlib.shake_256(bytes([10])).digest(50_000))
        await third.bring(10)
        assert third.holds(10)
        await first.bring(10)
        assert first.holds(10), "its own was not whole"

    run(test)


def test_checkpoint_with_unaccepted_signature_is_ignored(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path)
        first, second, _, guest = cluster.agents
        first.saves(10, by=NodeKey.generate())
        first.saves(20, by=guest.key)  # a member of the cluster, but not of this run
        assert await second.newest() == NewestCheckpointResponse()
        with pytest.raises(RunError, match="no connected machine has it"):
            await second.bring(20)
        first.service.signers_of = lambda run: frozenset({guest.me.raw})  # type: ignore[method-assign]
        with pytest.raises(RunError, match="it was not signed by a machine of this cluster"):
            await second.bring(20)
        assert second.steps() == []
        assert second.stored() == 0, "what was fetched for it is gone again"

    run(test)


def test_guests_cannot_read_checkpoints_of_other_runs(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path)
        first, _, _, guest = cluster.agents
        first.saves(10)
        assert await guest.newest() == NewestCheckpointResponse()
        with pytest.raises(RunError, match="no part in"):
            await guest.service.fetcher.fetch(RUN, 10, [first.me])
        with pytest.raises(RunError, match="for owners and its participants"):
            await guest.service.fetcher.fetch_files(first.me, guest.registry.runs[RUN], [cluster.folder_id])
        guest.saves(20, by=first.key)
        assert "no copy" in await guest.service.offer(first.me, RUN, 20)

    run(test)


def test_guest_takes_no_copy_before_its_user_agrees(tmp_path: Path) -> None:
    """An owner offers a checkpoint of a run that names the guest, whose user was not asked yet."""

    async def test() -> None:
        cluster = Cluster(tmp_path, (0, 3))
        first, _, _, guest = cluster.agents
        first.saves(10)
        assert "has not agreed" in await first.service.offer(guest.me, RUN, 10)
        assert not guest.steps()
        assert guest.stored() == 0
        home = run_directory(guest.service._context.directory, RUN)
        home.mkdir(parents=True, exist_ok=True)
        note_agreement(home, is_sandboxed=True)
        assert await first.service.offer(guest.me, RUN, 10) == ""
        assert guest.steps()

    run(test)


def test_sign_only_for_members_of_current_group(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path)
        first, second, *_ = cluster.agents
        response = await first.service.answer(SignRequest(RUN, 0, 1, 10, bytes(32)))
        assert isinstance(response, SignResponse)
        assert CheckpointSignature(response.node, response.signature) == sign(first.key, RUN, 10, bytes(32))
        for request in (SignRequest(RUN, 0, 2, 10, bytes(32)), SignRequest("train-xyz", 0, 1, 10, bytes(32))):
            with pytest.raises(RunError, match="only workers of run"):
                await first.service.answer(request)
        with pytest.raises(RunError, match="only workers of run"):
            await second.service.answer(SignRequest(RUN, 0, 1, 10, bytes(32)))

    run(test)


def test_request_fails_at_once_when_connection_is_lost(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path)
        first, second, *_ = cluster.agents
        first.saves(10)
        first.service.received = lambda node, message: None  # type: ignore[method-assign]
        request = asyncio.create_task(second.newest())
        while first.me not in {node for node, _ in second.service._calls._waiting}:
            await asyncio.sleep(0.01)
        begin = asyncio.get_running_loop().time()
        second.service.link_down(first.me)
        assert await request == NewestCheckpointResponse()
        assert asyncio.get_running_loop().time() - begin < 30, "not the whole patience"

    run(test)
