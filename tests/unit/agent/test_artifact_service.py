"""Several transfer services on one loop, with real stores on disk and connections that fail."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from barnraise.agent.artifact_service import ArtifactService, TransferProgress
from barnraise.artifacts import PIECE, ArtifactStore, FolderLimits, PackedFolder, pack
from barnraise.artifacts.store.manifest import FileEntry, encode_manifest, make_manifest, manifest_id
from barnraise.artifacts.transfer import messages, swarm_scheduler
from barnraise.artifacts.transfer.messages import (
    ManifestIs,
    PieceData,
    PieceList,
    PieceName,
    WantManifest,
    WantPieces,
)
from barnraise.core.errors import ProtocolError, ShippingError, TransportError
from barnraise.identity import NodeId

LIMITS = FolderLimits(most_bytes=1 << 30, most_files=10_000)


def node(number: int) -> NodeId:
    return NodeId(bytes([number]) * 32)


class Network:
    """Carries messages one by one on the loop; a cut link loses what is on the way."""

    def __init__(self) -> None:
        self.hosts: dict[NodeId, Host] = {}
        self.cut: set[frozenset[NodeId]] = set()
        self.sent: Counter[tuple[NodeId, NodeId]] = Counter()
        self.messages: Counter[tuple[NodeId, NodeId]] = Counter()
        self.on_message: Callable[[NodeId, NodeId, bytes], bytes | None] = lambda _a, _b, body: body

    def link(self, a: NodeId, b: NodeId, *, up: bool) -> None:
        pair = frozenset((a, b))
        if up == (pair not in self.cut):
            return
        self.cut ^= {pair}
        for node, peer in ((a, b), (b, a)):
            host = self.hosts[node]
            host.waiting[peer].clear()
            if up:
                host.artifacts.link_up(peer)
            else:
                host.artifacts.link_down(peer)

    def isolate(self, node: NodeId, *, up: bool = False) -> None:
        for peer in self.hosts:
            if peer != node:
                self.link(node, peer, up=up)


class Host:
    def __init__(self, network: Network, me: NodeId, directory: Path, patience_s: float = 60.0) -> None:
        self.network = network
        self.me = me
        self.waiting: dict[NodeId, deque[bytes]] = {}
        self.store = ArtifactStore(directory / me.raw.hex()[:4])
        self.artifacts = ArtifactService(self.store, self, patience_s=patience_s)
        self.faults: list[Exception] = []
        network.hosts[me] = self
        for host in network.hosts.values():
            for other in network.hosts.values():
                host.waiting.setdefault(other.me, deque())

    def linked(self, other: NodeId) -> bool:
        return other in self.network.hosts and frozenset((self.me, other)) not in self.network.cut

    def name(self, other: NodeId) -> str:
        return f"h{other.raw[0]}"

    def send_ship(self, other: NodeId, body: bytes) -> None:
        assert len(body) <= (8 << 20) - 1
        if self.linked(other):
            self.waiting[other].append(body)
            asyncio.get_running_loop().call_soon(self._deliver, other)

    async def drained(self, other: NodeId) -> None:
        while sum(map(len, self.waiting[other])) > 1 << 20:
            await asyncio.sleep(0.001)
        if not self.linked(other):
            raise TransportError("the link is gone")

    def _deliver(self, other: NodeId) -> None:
        if not self.waiting[other]:
            return
        body = self.network.on_message(self.me, other, self.waiting[other].popleft())
        if body is None:
            return
        self.network.sent[self.me, other] += len(body)
        self.network.messages[self.me, other] += 1
        try:
            self.network.hosts[other].artifacts.received(self.me, memoryview(body))
        except (ProtocolError, ShippingError) as error:
            self.network.hosts[other].faults.append(error)


def make_folder(folder: Path, seed: int = 1, large: int = 3, small: int = 40) -> Path:
    source = random.Random(seed)
    (folder / "sub").mkdir(parents=True)
    for number in range(large):
        size = 2 * PIECE + source.randrange(PIECE)
        (folder / f"large{number}.bin").write_bytes(source.randbytes(size))
    for number in range(small):
        (folder / "sub" / f"small{number}.txt").write_bytes(source.randbytes(source.randrange(1, 3000)))
    (folder / "empty").write_bytes(b"")
    return folder


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(bounded())


class Cluster:
    """Host 0 has packed the folder; the others want it."""

    def __init__(self, tmp_path: Path, count: int, patience_s: float = 60.0) -> None:
        self.network = Network()
        self.hosts = [Host(self.network, node(number), tmp_path, patience_s) for number in range(count)]
        self.source, *self.receivers = self.hosts
        self.nodes = [host.me for host in self.receivers]

    def pack(self, folder: Path) -> PackedFolder:
        packed = pack(folder, self.source.store, LIMITS)
        for host in self.hosts:
            host.artifacts.allow(packed.id, [*self.nodes, self.source.me])
        return packed

    def fetch(
        self, host: Host, packed: PackedFolder, **more: Callable[[TransferProgress], None]
    ) -> Awaitable[object]:
        return host.artifacts.fetch(packed.id, [self.source.me], self.nodes, LIMITS, **more)

    async def fetch_all(self, packed: PackedFolder) -> None:
        await asyncio.gather(*(self.fetch(host, packed) for host in self.receivers))

    def check(self, packed: PackedFolder, tmp_path: Path) -> None:
        for host in self.receivers:
            assert host.store.missing(packed.manifest) == {}
            assert host.faults == []
            target = tmp_path / f"out-{host.me.raw.hex()[:4]}-{packed.id.hex()[:8]}"
            host.store.unpack(packed.manifest, target)
            for entry in packed.manifest.files:
                assert (target / entry.path).stat().st_size == entry.size

    async def close(self) -> None:
        for host in self.hosts:
            await host.artifacts.close()


def test_fetch_by_three_nodes_source_sends_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However late one begins here: the others wait for it instead of asking the source, too.
    monkeypatch.setattr("barnraise.artifacts.transfer.piece_server._START_S", 60.0)

    async def test() -> None:
        cluster = Cluster(tmp_path, 4)
        packed = cluster.pack(make_folder(tmp_path / "work"))
        seen: list[TransferProgress] = []
        first, *others = cluster.receivers
        await asyncio.gather(
            cluster.fetch(first, packed, progress=seen.append),
            *(cluster.fetch(receiver, packed) for receiver in others),
        )
        cluster.check(packed, tmp_path)
        uploaded = sum(cluster.network.sent[cluster.source.me, other] for other in cluster.nodes)
        assert packed.bytes <= uploaded < 1.1 * packed.bytes + 100_000
        assert seen[-1] == TransferProgress(packed.bytes, packed.bytes, ())
        await cluster.close()

    run(test)


def test_fetch_small_files_are_batched(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, 2)
        packed = cluster.pack(make_folder(tmp_path / "work", large=0, small=2000))
        await cluster.fetch_all(packed)
        cluster.check(packed, tmp_path)
        assert cluster.network.messages[cluster.source.me, cluster.nodes[0]] < 60
        await cluster.close()

    run(test)


def test_fetch_again_sends_only_changes(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, 3)
        folder = make_folder(tmp_path / "work")
        await cluster.fetch_all(cluster.pack(folder))
        cluster.network.sent.clear()
        (folder / "sub" / "small1.txt").write_text("changed")
        packed = cluster.pack(folder)
        await cluster.fetch_all(packed)
        cluster.check(packed, tmp_path)
        assert sum(cluster.network.sent.values()) < 50_000
        await cluster.close()

    run(test)


@pytest.mark.parametrize("seed", range(6))
def test_fetch_survives_lost_connections(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_scheduler, "RETRY_S", 0.05)

    async def test() -> None:
        chance = random.Random(seed)
        cluster = Cluster(tmp_path, 4)
        packed = cluster.pack(make_folder(tmp_path / "work", seed))

        async def disturb() -> None:
            while True:
                await asyncio.sleep(chance.random() * 0.02)
                a, b = chance.sample(cluster.hosts, 2)
                cluster.network.link(a.me, b.me, up=chance.random() < 0.6)

        trouble = asyncio.create_task(disturb())
        work = asyncio.gather(*(cluster.fetch(host, packed) for host in cluster.receivers))
        await asyncio.sleep(0.4)
        trouble.cancel()
        for host in cluster.hosts:
            cluster.network.isolate(host.me, up=True)
        await work
        cluster.check(packed, tmp_path)
        await cluster.close()

    run(test)


def test_fetch_continues_from_receiver_when_source_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm_scheduler, "RETRY_S", 0.05)
    monkeypatch.setattr("barnraise.artifacts.transfer.piece_server._START_S", 0.1)
    monkeypatch.setattr("barnraise.artifacts.transfer.piece_server._LOOK_S", 0.05)

    async def test() -> None:
        cluster = Cluster(tmp_path, 4)
        packed = cluster.pack(make_folder(tmp_path / "work"))
        await cluster.fetch(cluster.receivers[2], packed)
        cluster.network.isolate(cluster.source.me)
        await cluster.fetch_all(packed)
        cluster.check(packed, tmp_path)
        await cluster.close()

    run(test)


def test_fetch_resumes_after_agent_restart(tmp_path: Path) -> None:
    async def first() -> PackedFolder:
        cluster = Cluster(tmp_path, 2)
        packed = cluster.pack(make_folder(tmp_path / "work", large=1, small=0))
        (receiver,) = cluster.receivers
        task = asyncio.ensure_future(cluster.fetch(receiver, packed))
        (name,) = packed.manifest.objects()
        while receiver.store.read_piece(name, 0) is None:
            await asyncio.sleep(0.001)
        cluster.network.isolate(receiver.me)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.close()
        return packed

    async def second(packed: PackedFolder) -> None:
        cluster = Cluster(tmp_path, 2)
        (receiver,) = cluster.receivers
        missing = receiver.store.missing(packed.manifest)
        left = sum(len(numbers) for numbers in missing.values())
        cluster.source.artifacts.allow(packed.id, cluster.nodes)
        await cluster.fetch(receiver, packed)
        assert receiver.store.missing(packed.manifest) == {}
        assert cluster.network.sent[cluster.source.me, receiver.me] <= left * PIECE + 10_000
        assert left < 3
        await cluster.close()

    packed = asyncio.run(first())
    asyncio.run(second(packed))


def test_fetch_wrong_bytes_exclude_receiver_or_name_source(tmp_path: Path) -> None:
    def spoil(body: bytes) -> bytes:
        message = messages.decode(body)
        if not isinstance(message, PieceList):
            return body
        pieces = [PieceData(piece.name, memoryview(bytes(len(piece.data)))) for piece in message.pieces]
        return messages.encode(PieceList(tuple(pieces)))

    async def test() -> None:
        cluster = Cluster(tmp_path, 3)
        packed = cluster.pack(make_folder(tmp_path / "work"))
        liar = cluster.receivers[0].me
        cluster.network.on_message = lambda a, _b, body: spoil(body) if a == liar else body
        await cluster.fetch_all(packed)
        cluster.check(packed, tmp_path)
        await cluster.close()

        other = Cluster(tmp_path / "second", 2)
        other.pack(tmp_path / "work")
        other.network.on_message = lambda a, _b, body: spoil(body) if a == other.source.me else body
        with pytest.raises(ShippingError, match="sent wrong bytes"):
            await other.fetch_all(packed)
        await other.close()

    run(test)


def test_serve_only_to_allowed_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.artifacts.transfer.piece_server._START_S", 0.1)
    monkeypatch.setattr("barnraise.artifacts.transfer.piece_server._LOOK_S", 0.05)

    async def test() -> None:
        cluster = Cluster(tmp_path, 3)
        packed = pack(make_folder(tmp_path / "work", large=0), cluster.source.store, LIMITS)
        friend, stranger = cluster.nodes
        cluster.source.artifacts.allow(packed.id, [friend])
        replies: list[messages.Message] = []
        cluster.receivers[1].artifacts.received = lambda _node, body: replies.append(messages.decode(body))  # type: ignore[method-assign]
        (name, *_) = packed.manifest.objects()
        cluster.source.artifacts.received(stranger, messages.encode(WantManifest(packed.id)))
        cluster.source.artifacts.received(stranger, messages.encode(WantPieces((PieceName(name, 0),), True)))
        while not {ManifestIs, messages.LacksPieces} <= {type(reply) for reply in replies}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert [reply for reply in replies if isinstance(reply, PieceList)] == []
        assert [reply.data for reply in replies if isinstance(reply, ManifestIs)] == [b""]
        assert [reply.names for reply in replies if isinstance(reply, messages.LacksPieces)] == [
            (PieceName(name, 0),)
        ]
        await cluster.close()

    run(test)


def test_serve_excessive_requests_is_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, 2)
        packed = cluster.pack(make_folder(tmp_path / "work", large=1, small=0))
        greedy = cluster.nodes[0]
        (name,) = packed.manifest.objects()
        cluster.network.hosts[greedy].artifacts.received = lambda _node, _body: None  # type: ignore[method-assign]
        max_waiting = 0
        for _ in range(50):
            names = tuple(PieceName(name, number) for number in range(1000))
            cluster.source.artifacts.received(greedy, messages.encode(WantPieces(names, True)))
            await asyncio.sleep(0.002)
            max_waiting = max(max_waiting, sum(map(len, cluster.source.waiting[greedy])))
        assert max_waiting < 3 * PIECE
        await cluster.close()

    run(test)


def test_fetch_rejects_huge_or_escaping_manifest(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, 2)
        size = 1 << 39
        huge = make_manifest([FileEntry("a", size, False, tuple([bytes(32)] * (size // PIECE)))])
        escaping = make_manifest([FileEntry("../a", 1, False, (bytes(32),))])
        (receiver,) = cluster.receivers
        for bad in (escaping, huge):
            data = msgspec.msgpack.encode(bad)
            name = manifest_id(data)
            fetch = receiver.artifacts.fetch(name, [cluster.source.me], cluster.nodes, LIMITS)
            waiting = asyncio.ensure_future(fetch)
            while not cluster.network.messages[receiver.me, cluster.source.me]:
                await asyncio.sleep(0.001)
            cluster.network.messages.clear()
            receiver.artifacts.received(cluster.source.me, messages.encode(ManifestIs(name, data)))
            with pytest.raises(ShippingError):
                await waiting
        assert list(receiver.store.manifests.iterdir()) == []
        await cluster.close()

    run(test)


def test_fetch_timeout_names_silent_source(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, 2, patience_s=0.5)
        packed = cluster.pack(make_folder(tmp_path / "work", large=1, small=0))
        await asyncio.to_thread(cluster.receivers[0].store.put_manifest, packed.manifest)
        cluster.network.on_message = lambda _a, _b, _body: None
        with pytest.raises(ShippingError, match="waiting for h0") as caught:
            await cluster.fetch_all(packed)
        assert caught.value.is_silence
        await cluster.close()

    run(test)


def test_fetch_full_disk_raises_shipping_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, 2)
        packed = cluster.pack(make_folder(tmp_path / "work", large=0))

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("barnraise.artifacts.store.store.write_object", full)
        await asyncio.to_thread(
            (cluster.receivers[0].store.manifests / packed.id.hex()).write_bytes,
            encode_manifest(packed.manifest),
        )
        with pytest.raises(ShippingError, match="is full"):
            await cluster.fetch_all(packed)
        await cluster.close()

    run(test)


def test_fetch_shared_by_two_callers_survives_one(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, 2)
        packed = cluster.pack(make_folder(tmp_path / "work"))
        (receiver,) = cluster.receivers
        first = asyncio.ensure_future(cluster.fetch(receiver, packed))
        second = asyncio.ensure_future(cluster.fetch(receiver, packed))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == packed.manifest
        assert cluster.network.sent[cluster.source.me, receiver.me] < 1.1 * packed.bytes + 100_000
        await cluster.close()

    run(test)


def test_received_invalid_message_raises_protocol_error(tmp_path: Path) -> None:
    async def test() -> None:
        cluster = Cluster(tmp_path, 2)
        for junk in (b"", b"\xc1", os.urandom(100), messages.encode(WantPieces((), True))[:-1]):
            with pytest.raises(ProtocolError):
                cluster.source.artifacts.received(cluster.nodes[0], junk)
        await cluster.close()

    run(test)


def test_list_files_writes_nothing_and_sends_no_piece(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network()
        source, reader = (Host(network, node(number), tmp_path) for number in (1, 2))
        packed = pack(make_folder(tmp_path / "folder"), source.store, LIMITS)
        source.artifacts.allow(packed.id, [reader.me])
        manifest = await reader.artifacts.list_files(packed.id, [source.me], LIMITS)
        assert manifest == packed.manifest
        assert not [path for path in reader.store.directory.rglob("*") if path.is_file()]
        assert network.sent[source.me, reader.me] < 20_000
        fetched = await reader.artifacts.fetch(packed.id, [source.me], [reader.me], LIMITS)
        assert fetched == manifest, "the same machine may fetch it afterwards"
        with pytest.raises(ShippingError, match="at most 10 B are allowed"):
            await reader.artifacts.list_files(packed.id, [source.me], FolderLimits(10, 10_000))
        for host in (source, reader):
            await host.artifacts.close()

    asyncio.run(main())
