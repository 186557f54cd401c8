"""Transfers folders and data sets between agents: requests missing pieces, serves pieces to allowed machines.

Disk access and hashing run in threads, because the event loop also carries heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from barnraise.artifacts.store.manifest import (
    FileEntry,
    FolderLimits,
    FolderManifest,
    decode_manifest,
    manifest_id,
)
from barnraise.artifacts.store.store import ArtifactStore, PartialObject
from barnraise.artifacts.transfer import messages, swarm_scheduler
from barnraise.artifacts.transfer.messages import (
    LacksPieces,
    ManifestIs,
    PieceList,
    PieceName,
    PieceSoon,
    WantManifest,
    WantPieces,
)
from barnraise.artifacts.transfer.piece_server import PieceServer
from barnraise.artifacts.transfer.swarm_scheduler import PieceSized, SwarmScheduler
from barnraise.core.errors import ShippingError
from barnraise.identity import NodeId

PATIENCE_S = 120.0
_ASK_MANIFEST_S = 6.0
_TICK_S = 1.0
_REPORT_S = 0.2
_WRITE_BATCH = 16 << 20
_MAX_UNWRITTEN = 128 << 20

_log = logging.getLogger(__name__)


class ArtifactCarrier(Protocol):
    """Connection port of the transfer service: bulk messages to other agents."""

    @property
    def me(self) -> NodeId:
        """Return the id of this machine."""

    def send_ship(self, node: NodeId, body: bytes) -> None:
        """Send a message; it is dropped if the machine is not connected."""

    def linked(self, node: NodeId) -> bool:
        """Tell whether a machine is connected."""

    def name(self, node: NodeId) -> str:
        """Return the name that people know a machine by."""

    def drained(self, node: NodeId) -> Awaitable[None]:
        """Wait until the send buffer is nearly empty; raise BarnraiseError if the connection is lost."""


@dataclass(frozen=True)
class TransferProgress:
    """Progress of a fetch; ``waits_for``: machines that have not answered yet."""

    done_bytes: int
    all_bytes: int
    waits_for: tuple[NodeId, ...]


OnProgress = Callable[[TransferProgress], None]
# Runs in a thread before a piece is requested: it may put contents into the store that this machine has
# elsewhere, and calls its second argument after each of them. It may raise to reject the files.
OnManifest = Callable[[FolderManifest, Callable[[], None]], None]


@dataclass(frozen=True)
class _PendingWrite:
    """One received piece that is not on disk yet."""

    fetch: _Fetch
    node: NodeId
    name: PieceName
    data: memoryview


class ArtifactService:
    """Sends and receives the pieces of artifacts while the agent runs."""

    def __init__(
        self, store: ArtifactStore, carrier: ArtifactCarrier, *, patience_s: float = PATIENCE_S
    ) -> None:
        self.store = store
        self.carrier = carrier
        self.patience_s = patience_s
        self.serving = PieceServer(store, carrier, self._is_coming)
        self._fetches: dict[bytes, _Fetch] = {}
        self._lists: dict[bytes, _Fetch] = {}
        self._unwritten: list[_PendingWrite] = []
        self._unwritten_bytes = 0
        self._writer: asyncio.Task[None] | None = None
        self._closed = False

    async def fetch(
        self,
        manifest: bytes,
        sources: Iterable[NodeId],
        receivers: Iterable[NodeId],
        limits: FolderLimits,
        progress: OnProgress = lambda _: None,
        on_manifest: OnManifest | None = None,
    ) -> FolderManifest:
        """Fetch all pieces of a manifest into the store, and return the manifest.

        Every receiver must be given the same sources and receivers. Raise ShippingError if the fetch fails;
        received pieces are kept.
        """
        fetch = self._fetches.get(manifest)
        if fetch is None:
            fetch = self._fetches[manifest] = _Fetch(self, manifest, list(sources), set(receivers), limits)
            fetch.on_manifest = on_manifest
        elif fetch.limits != limits:
            raise ShippingError(
                "the same files are already being fetched with other limits", hint="Run it again."
            )
        return await fetch.wait(progress)

    async def list_files(
        self, manifest: bytes, sources: Iterable[NodeId], limits: FolderLimits
    ) -> FolderManifest:
        """Return a manifest, and write nothing to disk. Raise ShippingError if no machine sends it."""
        listing = self._lists.get(manifest)
        if listing is None:
            listing = self._lists[manifest] = _Fetch(
                self, manifest, list(sources), (), limits, only_lists=True
            )
        return await listing.wait(lambda _: None)

    def allow(self, manifest: bytes, nodes: Iterable[NodeId]) -> None:
        """Let these machines read the manifest's pieces, also those that arrive later."""
        self.serving.allow(manifest, nodes)

    def withdraw(self, manifest: bytes) -> None:
        """Stop serving a manifest; pieces that another manifest names are still served."""
        self.serving.withdraw(manifest)

    async def close(self) -> None:
        """Cancel all fetches and stop serving."""
        self._closed = True
        tasks: list[asyncio.Task[FolderManifest] | asyncio.Task[None]] = [
            fetch.task for fetch in (*self._fetches.values(), *self._lists.values())
        ]
        if self._writer is not None:
            tasks.append(self._writer)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.serving.close()

    def link_up(self, node: NodeId) -> None:
        """Resume fetches from a machine that is connected again."""
        for fetch in list(self._fetches.values()):
            fetch.handle(swarm_scheduler.PeerUp(node))

    def link_down(self, node: NodeId) -> None:
        """Schedule the pieces of a lost machine again.

        Call it also if only the bulk connection broke.
        """
        self.serving.forget(node)
        for fetch in list(self._fetches.values()):
            fetch.handle(swarm_scheduler.PeerDown(node))

    def received(self, node: NodeId, body: bytes | memoryview) -> None:
        """Handle a message of a machine; raise ProtocolError if it cannot be decoded.

        Pieces that were not requested are dropped.
        """
        message = messages.decode(body)
        match message:
            case WantPieces():
                self.serving.wanted(node, message)
            case WantManifest():
                self.serving.manifest_wanted(node, message.id)
            case PieceList():
                self._on_pieces(node, message)
            case LacksPieces():
                for fetch in list(self._fetches.values()):
                    fetch.handle(swarm_scheduler.PieceRefused(node, message.names))
            case PieceSoon():
                for fetch in list(self._fetches.values()):
                    fetch.handle(swarm_scheduler.PiecePromised(node))
            case ManifestIs():
                for waiting in (self._fetches.get(message.id), self._lists.get(message.id)):
                    if waiting is not None:
                        waiting.manifest_received(node, message.data)

    # writes to disk

    def _on_pieces(self, node: NodeId, message: PieceList) -> None:
        for piece in message.pieces:
            fetch = next(
                (candidate for candidate in self._fetches.values() if candidate.needs(node, piece.name)), None
            )
            if fetch is None:
                continue
            if self._unwritten_bytes + len(piece.data) > _MAX_UNWRITTEN:
                fetch.handle(swarm_scheduler.PieceRefused(node, [piece.name]))
                continue
            fetch.writing.add((node, piece.name))
            self._unwritten.append(_PendingWrite(fetch, node, piece.name, piece.data))
            self._unwritten_bytes += len(piece.data)
        if self._unwritten and self._writer is None and not self._closed:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._unwritten:
                batch = self._next_batch()
                arrivals = [
                    PartialObject(write.fetch.objects[write.name.object], write.name.number, write.data)
                    for write in batch
                ]
                try:
                    outcomes = await asyncio.to_thread(self.store.write_pieces, arrivals)
                except ShippingError as error:
                    for fetch in {write.fetch for write in batch}:
                        fetch.fail(error)
                    continue
                finally:
                    self._unwritten_bytes -= sum(len(write.data) for write in batch)
                    for write in batch:
                        write.fetch.writing.discard((write.node, write.name))
                self._written(batch, outcomes)
        finally:
            self._writer = None

    def _next_batch(self) -> list[_PendingWrite]:
        size = count = 0
        for write in self._unwritten:
            size += len(write.data)
            count += 1
            if size >= _WRITE_BATCH:
                break
        batch, self._unwritten = self._unwritten[:count], self._unwritten[count:]
        return batch

    def _written(self, batch: list[_PendingWrite], outcomes: list[ShippingError | None]) -> None:
        valid: dict[NodeId, list[PieceName]] = {}
        for write, error in zip(batch, outcomes, strict=True):
            if error is None:
                valid.setdefault(write.node, []).append(write.name)
            else:
                write.fetch.distrust(write.node, error)
        for node, names in valid.items():
            self.serving.here(names)
            for fetch in list(self._fetches.values()):
                fetch.handle(swarm_scheduler.PieceReceived(node, names))

    def _is_coming(self, name: PieceName) -> bool:
        return any(fetch.is_coming(name) for fetch in self._fetches.values())

    def fetch_done(self, manifest: bytes, fetch: _Fetch) -> None:
        """Forget a fetch that has finished or was cancelled."""
        for table in (self._fetches, self._lists):
            if table.get(manifest) is fetch:
                del table[manifest]


class _Fetch:
    """The fetch of one manifest, and of its pieces; several callers can wait for it."""

    def __init__(
        self,
        service: ArtifactService,
        name: bytes,
        sources: list[NodeId],
        receivers: Collection[NodeId],
        limits: FolderLimits,
        *,
        only_lists: bool = False,
    ) -> None:
        self._service = service
        self._only_lists = only_lists  # the manifest, in memory
        self._name = name
        self._sources = sources
        self._receivers = receivers
        self.limits = limits
        self.on_manifest: OnManifest | None = None
        self.objects: dict[bytes, FileEntry] = {}
        self.writing: set[tuple[NodeId, PieceName]] = set()  # pieces on their way to the disk
        self._loop = asyncio.get_running_loop()
        self._scheduler: SwarmScheduler | None = None
        self._all_bytes = 0
        self._heard_at = self._loop.time()
        self._asked_node: NodeId | None = None  # for the manifest
        self._manifest_future: asyncio.Future[bytes] | None = None
        self._failed: ShippingError | None = None
        self._progressed = asyncio.Event()
        self._listeners: list[OnProgress] = []
        self.task = self._loop.create_task(self._run())
        # The last caller may have left at the same moment: then the error has no reader.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def wait(self, progress: OnProgress) -> FolderManifest:
        """Wait for the result; cancel the fetch when the last caller leaves."""
        self._listeners.append(progress)
        try:
            return await asyncio.shield(self.task)
        finally:
            self._listeners.remove(progress)
            if not self._listeners:
                self.task.cancel()
                self._service.fetch_done(self._name, self)

    # events

    def needs(self, node: NodeId, name: PieceName) -> bool:
        """Tell whether this piece is expected from this machine."""
        return (
            self._scheduler is not None
            and (node, name) not in self.writing
            and self._scheduler.wants(node, name)
        )

    def is_coming(self, name: PieceName) -> bool:
        """Tell whether this piece is still missing here."""
        if self._scheduler is None:  # this machine looks for it elsewhere first
            return name.object in self.objects
        return self._scheduler.lacks(name)

    def handle(self, event: swarm_scheduler.Event) -> None:
        """Pass an event to the scheduler, and send the requests that it returns."""
        if self._scheduler is None or self._failed is not None:
            return
        if isinstance(event, swarm_scheduler.PieceReceived):
            self._heard_at = self._loop.time()
        for ask in self._scheduler.handle(event, self._loop.time()):
            self._service.carrier.send_ship(ask.node, messages.encode(WantPieces(ask.names, ask.hold)))
        if self._scheduler.done:
            self._progressed.set()

    def manifest_received(self, node: NodeId, data: bytes) -> None:
        """Accept the manifest from the machine that was asked, and from no other."""
        if (
            self._manifest_future is not None
            and node == self._asked_node
            and not self._manifest_future.done()
        ):
            self._manifest_future.set_result(data)

    def distrust(self, node: NodeId, error: ShippingError) -> None:
        """Stop requesting from a machine that sent bytes with a wrong hash."""
        name = self._service.carrier.name(node)
        _log.warning("not requesting from %s any more: %s", name, error.message)
        self.handle(swarm_scheduler.PeerDistrusted(node))
        if self._scheduler is not None and not self._scheduler.has_trusted_source():
            self.fail(ShippingError(f"{name} sent wrong bytes: {error.message}", hint=error.hint))

    def fail(self, error: ShippingError) -> None:
        """Fail the fetch with its first error."""
        self._failed = self._failed or error
        self._progressed.set()

    async def _run(self) -> FolderManifest:
        store = self._service.store
        try:
            manifest = await self._get_manifest()
            if self._only_lists:
                return manifest
            if self.on_manifest is not None:
                await self._show_manifest(manifest, self.on_manifest)
            linked = self._linked()
            state = await asyncio.to_thread(self._prepare, manifest, linked)
            self._scheduler = state
            for node in linked ^ self._linked():  # they changed meanwhile
                self.handle(
                    swarm_scheduler.PeerDown(node) if node in linked else swarm_scheduler.PeerUp(node)
                )
            self._service.serving.manifest_here()
            if not state.done:
                await asyncio.to_thread(store.check_room, state.left)
                await self._get_pieces(state)
            self._report()
            return manifest
        finally:
            self._service.fetch_done(self._name, self)

    async def _show_manifest(self, manifest: FolderManifest, on_manifest: OnManifest) -> None:
        serving = self._service.serving

        def serve() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(serving.manifest_here)

        self.objects = manifest.objects()
        await asyncio.to_thread(on_manifest, manifest, serve)

    def _linked(self) -> set[NodeId]:
        carrier = self._service.carrier
        peers = {*self._sources, *self._receivers} - {carrier.me}
        return {node for node in peers if carrier.linked(node)}

    def _prepare(self, manifest: FolderManifest, linked: set[NodeId]) -> SwarmScheduler:
        """Return a scheduler for the missing pieces; runs in a thread, because it hashes partial files."""
        missing = self._service.store.missing(manifest)
        self.objects = manifest.objects()
        pieces = [
            PieceSized(PieceName(name, number), entry.piece_size(number))
            for name, entry in self.objects.items()
            for number in range(len(entry.pieces))
        ]
        wanted = {PieceName(name, number) for name, numbers in missing.items() for number in numbers}
        self._all_bytes = sum(piece.size for piece in pieces)
        return SwarmScheduler(
            self._service.carrier.me, self._sources, self._receivers, pieces, wanted, linked
        )

    async def _get_pieces(self, state: SwarmScheduler) -> None:
        self._heard_at = self._loop.time()
        ticked = self._loop.time()
        self.handle(swarm_scheduler.SwarmTick())
        while not state.done:
            self._progressed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._progressed.wait(), _REPORT_S)
            if self._failed is not None:
                raise self._failed
            now = self._loop.time()
            if now - ticked >= _TICK_S:
                ticked = now
                self.handle(swarm_scheduler.SwarmTick())
            if now - self._heard_at > self._service.patience_s:
                raise self._no_progress_error(
                    f"no piece received for {self._service.patience_s:g} s", state.waits_for()
                )
            self._report()

    def _report(self) -> None:
        if self._scheduler is not None:
            waits_for = () if self._scheduler.done else tuple(self._scheduler.waits_for())
            progress = TransferProgress(self._all_bytes - self._scheduler.left, self._all_bytes, waits_for)
            for listener in list(self._listeners):
                listener(progress)

    async def _get_manifest(self) -> FolderManifest:
        store = self._service.store
        data = await asyncio.to_thread(store.encoded_manifest, self._name)
        if data is not None:
            return await asyncio.to_thread(decode_manifest, data, self.limits)
        until = self._loop.time() + self._service.patience_s
        while self._loop.time() < until:
            data = await self._ask_manifest()
            if data is not None:
                manifest = await asyncio.to_thread(decode_manifest, data, self.limits)
                if not self._only_lists:
                    await asyncio.to_thread(store.put_manifest, manifest)
                return manifest
            await asyncio.sleep(min(_TICK_S, self._service.patience_s / 4))
        raise self._no_progress_error("no machine sent the list of files", self._sources)

    async def _ask_manifest(self) -> bytes | None:
        """Ask each connected machine once for the manifest; return None if none has it."""
        carrier = self._service.carrier
        for node in dict.fromkeys((*self._sources, *sorted(self._receivers))):
            if node == carrier.me or not carrier.linked(node):
                continue
            self._asked_node, self._manifest_future = node, self._loop.create_future()
            carrier.send_ship(node, messages.encode(WantManifest(self._name)))
            try:
                data = await asyncio.wait_for(self._manifest_future, _ASK_MANIFEST_S)
            except TimeoutError:
                continue
            if data and await asyncio.to_thread(manifest_id, data) == self._name:
                return data
            if data:
                _log.warning("%s sent a list of files with a wrong hash", carrier.name(node))
        return None

    def _no_progress_error(self, what: str, nodes: Iterable[NodeId]) -> ShippingError:
        names = ", ".join(map(self._service.carrier.name, nodes))
        error = ShippingError(
            f"{what}; waiting for {names or 'no machine'}",
            hint="Check with `barnraise status` that these machines are on, then run it again: received "
            "files are kept.",
        )
        error.is_silence = True
        return error
