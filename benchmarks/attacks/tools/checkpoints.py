"""Attacks on checkpoints by members whose keys are good; served with those of ``tools.runs``."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping

import msgspec

from barnraise.agent import protocol
from barnraise.agent.runs import messages
from barnraise.agent.runs.messages import (
    CheckpointRequest,
    CopyOffer,
    CopyResult,
    FilesRequest,
    FilesResponse,
    HeldCheckpointsRequest,
    HeldCheckpointsResponse,
)
from barnraise.artifacts.store.manifest import FileEntry, make_manifest, manifest_id, piece_hash
from barnraise.artifacts.transfer import messages as shipping
from barnraise.artifacts.transfer.messages import ManifestIs, PieceData, PieceList, WantManifest, WantPieces
from barnraise.identity import NodeId, NodeKey
from barnraise.runs.checkpoint_manifest import (
    MANIFEST,
    SEAL,
    STATE,
    HeldCheckpoint,
    encode,
    fingerprint,
    sign,
)
from barnraise.runs.checkpoint_manifest import CheckpointManifest as Checkpoint
from barnraise.transport.listener.preface import ROUTE_AGENT_BULK, ROUTE_AGENT_SHIP
from benchmarks.attacks.tools.guest import Agents
from benchmarks.attacks.tools.run_member import RunMember, until_found
from benchmarks.attacks.tools.toolbox import Result, tool

_TERABYTE = 10**12
_STEP = 7


@tool
async def guest_wants_checkpoints(keep: str, agents: Agents, run: str, step: int, seconds: float) -> Result:
    """Request the checkpoints, files and folder of a run in which the guest has no part, and offer a copy."""
    guest = RunMember(keep, agents)
    await guest.come()
    requests: list[CheckpointRequest] = [
        HeldCheckpointsRequest(1, (run,), True),
        HeldCheckpointsRequest(2, ("no-such-run", run), True),
        FilesRequest(3, run, step),
        FilesRequest(4, run, 0),
        FilesRequest(5, "no-such-run", step),
        CopyOffer(6, run, step),
        CopyOffer(7, "no-such-run", step),
    ]
    for question in requests:
        await guest.tell(messages.encode(question))
    # Responses without a request: a request of another machine may have any of these numbers.
    for serial in range(200):
        held = tuple(HeldCheckpoint(run, 10**11 + number, True) for number in range(6))
        for answer in (
            HeldCheckpointsResponse(serial, held, True, 10**11),
            FilesResponse(serial, bytes(32)),
            CopyResult(serial),
        ):
            await guest.tell(messages.encode(answer))

    def is_answered() -> bool:
        kinds = Counter(map(type, guest.received))
        each = Counter({HeldCheckpointsResponse: 2, FilesResponse: 3, CopyResult: 2})
        return all(kinds[kind] >= count * len(guest.agents) for kind, count in each.items())

    with contextlib.suppress(TimeoutError):
        await until_found(is_answered)
    await asyncio.sleep(seconds)
    received = guest.received
    return {
        "held": [
            [len(reply.held), reply.files, reply.sharded]
            for reply in received
            if isinstance(reply, HeldCheckpointsResponse)
        ],
        "lent": [len(reply.manifest) for reply in received if isinstance(reply, FilesResponse)],
        "copies": [reply.words for reply in received if isinstance(reply, CopyResult)],
    }


@tool
async def owner_offers(keep: str, agents: Agents, run: str, lie: str, folder: str, seconds: float) -> Result:
    """Offer a copy that is not what it claims to be; an agent that accepts the offer fetches it from here."""
    owner = RunMember(keep, agents)
    await owner.come()
    contents = _contents(owner.key, run, lie)
    listed = msgspec.msgpack.encode(make_manifest(_entries(contents, lie).values()))
    name = bytes.fromhex(folder) if lie == "the run's own folder" else manifest_id(listed)
    pieces = {_object(data): data for data in contents.values()}

    def answer(node: NodeId, message: object) -> None:
        link = owner.routes[node, ROUTE_AGENT_SHIP]
        if isinstance(message, FilesRequest):
            lent = FilesResponse(message.serial, name)
            owner.routes[node, ROUTE_AGENT_BULK].send(messages.encode(lent))
        elif isinstance(message, WantManifest):
            link.send(protocol.SHIP + shipping.encode(ManifestIs(message.id, listed)))
        elif isinstance(message, WantPieces):
            reply_pieces = [
                PieceData(piece_name, memoryview(pieces.get(piece_name.object, b"x")))
                for piece_name in message.names
            ]
            link.send(protocol.SHIP + shipping.encode(PieceList(tuple(reply_pieces))))

    owner.on_received = answer
    await owner.tell(messages.encode(CopyOffer(1, run, _STEP)))
    end = asyncio.get_running_loop().time() + seconds
    words: list[str] = []
    while len(words) < len(owner.agents) and asyncio.get_running_loop().time() < end:
        words = [reply.words for reply in owner.received if isinstance(reply, CopyResult)]
        await asyncio.sleep(0.05)
    return {"words": words}


def _contents(key: NodeKey, run: str, lie: str) -> dict[str, bytes]:
    """Return the files of a checkpoint; ``lie`` names what is wrong with it."""
    state = b"a state" * 100
    other = b"another state"
    manifest = encode(
        Checkpoint(
            run="another-run" if lie == "another run" else run,
            step=_STEP + 1 if lie == "another step" else _STEP,
            generation=1,
            digest="0" * 64,
            previous=None,
            file=_object(other if lie == "another state" else state).hex(),
            skeleton="",
        )
    )
    signer = NodeKey.generate() if lie == "a stranger's signature" else key
    seal = encode(sign(signer, run, _STEP, fingerprint(manifest)))
    if lie == "changed afterwards":
        manifest = manifest.replace(b'"generation":1', b'"generation":2')
    return {MANIFEST: manifest, SEAL: seal, STATE: state}


def _entries(contents: Mapping[str, bytes], lie: str) -> dict[str, FileEntry]:
    entries = {
        name: FileEntry(name, len(data), False, (piece_hash(data),)) for name, data in contents.items()
    }
    if lie == "a terabyte":
        entries[STATE] = FileEntry(STATE, _TERABYTE, False, entries[STATE].pieces)
    return entries


def _object(data: bytes) -> bytes:
    return FileEntry("x", len(data), False, (piece_hash(data),)).object
