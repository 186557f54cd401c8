"""Piece server: sends other agents the pieces that they may have, a bounded amount at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from barnraise.artifacts.store.manifest import PIECE
from barnraise.artifacts.store.store import ArtifactStore
from barnraise.artifacts.transfer import messages
from barnraise.artifacts.transfer.messages import (
    MOST_NAMES,
    MOST_TOGETHER,
    TOGETHER_BYTES,
    LacksPieces,
    ManifestIs,
    PieceData,
    PieceList,
    PieceName,
    PieceSoon,
    WantPieces,
)
from barnraise.core.errors import BarnraiseError, ShippingError
from barnraise.identity import NodeId

_MOST_QUEUED = 8192
_START_S = 3.0  # so long we wait to be told what a peer may have, and to begin to fetch it ourselves
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


class PieceOutlet(Protocol):
    def send_ship(self, node: NodeId, body: bytes) -> None: ...

    def drained(self, node: NodeId) -> Awaitable[None]: ...


@dataclass
class _Client:
    """Node with open requests."""

    queue: dict[PieceName, bool] = field(default_factory=dict)  # whether it may be held
    held: dict[PieceName, float] = field(default_factory=dict)  # since when
    manifests: dict[bytes, float] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def busy(self) -> bool:
        return bool(self.queue or self.held or self.manifests)


class PieceServer:
    """Server of pieces for other agents.

    ``is_coming``: tells whether this machine itself waits for a piece.
    """

    def __init__(
        self, store: ArtifactStore, outlet: PieceOutlet, is_coming: Callable[[PieceName], bool]
    ) -> None:
        self._store = store
        self._outlet = outlet
        self._is_coming = is_coming
        self._loop = asyncio.get_running_loop()
        self._allowed: dict[bytes, frozenset[NodeId]] = {}
        self._sizes: dict[bytes, dict[bytes, int]] = {}  # of the objects of allowed manifests that are here
        self._clients: dict[NodeId, _Client] = {}

    def allow(self, manifest: bytes, nodes: Iterable[NodeId]) -> None:
        self._allowed[manifest] = frozenset(nodes)
        self._wake_all()

    def withdraw(self, manifest: bytes) -> None:
        self._allowed.pop(manifest, None)
        self._sizes.pop(manifest, None)

    def forget(self, node: NodeId) -> None:
        """Drop the requests of a node whose link is gone; it will ask again."""
        client = self._clients.pop(node, None)
        if client is not None and client.task is not None:
            client.task.cancel()

    async def close(self) -> None:
        tasks = [client.task for client in self._clients.values() if client.task is not None]
        for node in list(self._clients):
            self.forget(node)
        await asyncio.gather(*tasks, return_exceptions=True)

    def here(self, names: Iterable[PieceName]) -> None:
        """Send pieces that have arrived to the nodes that wait for them."""
        clients = [client for client in self._clients.values() if client.held]
        for name in names if clients else ():
            for client in clients:
                if client.held.pop(name, None) is not None:
                    client.queue[name] = True
                    client.woken.set()

    def manifest_here(self) -> None:
        """Send a manifest that has arrived, and its pieces, to the nodes that wait for them."""
        self._wake_all()

    def wanted(self, node: NodeId, want: WantPieces) -> None:
        client = self._client(node)
        refused = []
        for name in want.names:
            if name in client.queue or name in client.held:
                continue
            if len(client.queue) + len(client.held) >= _MOST_QUEUED:
                refused.append(name)
            else:
                client.queue[name] = want.hold
        if refused:
            self._outlet.send_ship(node, messages.encode(LacksPieces(tuple(refused))))
        self._wake(node, client)

    def manifest_wanted(self, node: NodeId, name: bytes) -> None:
        client = self._client(node)
        if len(client.manifests) < MOST_NAMES:
            client.manifests.setdefault(name, self._loop.time())
        self._wake(node, client)

    # the work

    def _client(self, node: NodeId) -> _Client:
        return self._clients.setdefault(node, _Client())

    def _wake(self, node: NodeId, client: _Client) -> None:
        client.woken.set()
        if client.task is None and client.busy():
            client.task = self._loop.create_task(self._serve(node, client))

    def _wake_all(self) -> None:
        for client in self._clients.values():
            client.queue.update(dict.fromkeys(client.held, True))
            client.held.clear()
            client.woken.set()

    async def _serve(self, node: NodeId, client: _Client) -> None:
        try:
            while client.busy():
                client.woken.clear()
                await self._load_manifests()
                await self._answer_manifests(node, client)
                if client.queue:
                    await self._answer_pieces(node, client)
                    continue
                self._look_at_held(node, client)
                if client.busy():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(client.woken.wait(), _LOOK_S)
        except BarnraiseError as error:
            # It asks again, or its link is gone; a disk that cannot be read is for this machine's log.
            _log.warning("machine %s is not served: %s", node.short, error.message)
            client.queue.clear()
            client.held.clear()
            client.manifests.clear()
        finally:
            client.task = None

    async def _load_manifests(self) -> None:
        for name in [name for name in self._allowed if name not in self._sizes]:
            sizes = await asyncio.to_thread(self._read_sizes, name)
            if sizes is not None and name in self._allowed:
                self._sizes[name] = sizes

    def _read_sizes(self, name: bytes) -> dict[bytes, int] | None:
        try:
            manifest = self._store.manifest(name)
        except ShippingError as error:  # one that cannot be read must not keep us from serving the others
            _log.warning("nothing is served of one list of files: %s", error.message)
            return {}
        return None if manifest is None else {key: entry.size for key, entry in manifest.objects().items()}

    async def _answer_manifests(self, node: NodeId, client: _Client) -> None:
        for name, since in list(client.manifests.items()):
            may = node in self._allowed.get(name, ())
            data = await asyncio.to_thread(self._store.encoded_manifest, name) if may else None
            if data is None and self._loop.time() - since < _START_S:
                continue
            del client.manifests[name]
            await self._outlet.drained(node)
            self._outlet.send_ship(node, messages.encode(ManifestIs(name, data or b"")))

    async def _answer_pieces(self, node: NodeId, client: _Client) -> None:
        batch: list[PieceName] = []
        size = 0
        for name in client.queue:
            own = self._size(node, name)
            if batch and (size + own > TOGETHER_BYTES or len(batch) >= MOST_TOGETHER):
                break
            batch.append(name)
            size += own
        now = self._loop.time()
        lacked = set()
        for name in batch:
            if client.queue.pop(name):
                client.held[name] = now  # before we look: it may come meanwhile
            else:
                lacked.add(name)
        message, sent = await asyncio.to_thread(
            self._read, [name for name in batch if self._size(node, name)]
        )
        if sent:
            await self._outlet.drained(node)
            self._outlet.send_ship(node, message)
        for name in sent:
            client.held.pop(name, None)
            client.queue.pop(name, None)
        lacked -= sent
        if lacked:
            self._outlet.send_ship(node, messages.encode(LacksPieces(tuple(lacked))))

    def _size(self, node: NodeId, name: PieceName) -> int:
        """Return the piece's size; 0 if the node may not have it, or we do not know yet."""
        for manifest, sizes in self._sizes.items():
            size = sizes.get(name.object)
            if size is not None and node in self._allowed.get(manifest, ()):
                return max(0, min(PIECE, size - name.number * PIECE))
        return 0

    def _read(self, names: list[PieceName]) -> tuple[bytes, set[PieceName]]:
        """Read pieces into one message, in a thread."""
        pieces = []
        for name in names:
            data = self._store.read_piece(name.object, name.number)
            if data is not None:
                pieces.append(PieceData(name, memoryview(data)))
        return messages.encode(PieceList(tuple(pieces))), {piece.name for piece in pieces}

    def _look_at_held(self, node: NodeId, client: _Client) -> None:
        """Send a notice that the pieces are still awaited, or that they will not come."""
        now = self._loop.time()
        late = [name for name, since in client.held.items() if now - since >= _START_S]
        refused = [name for name in late if not self._is_coming(name) or not self._size(node, name)]
        for name in refused:
            del client.held[name]
        for start in range(0, len(refused), MOST_NAMES):
            self._outlet.send_ship(
                node, messages.encode(LacksPieces(tuple(refused[start : start + MOST_NAMES])))
            )
        if client.held:
            self._outlet.send_ship(node, messages.encode(PieceSoon()))
