"""Attacks on runs, by members of the cluster whose keys are good: guests that want more, an owner that lies.

``python -m benchmarks.attacks.tools`` starts them; the attacks of the scene ``RunCluster`` use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from barnraise.agent import protocol
from barnraise.agent.cluster.kv_proxy import KvProxyReply, KvProxyRequest
from barnraise.agent.runs import messages
from barnraise.agent.runs.messages import (
    HeldCheckpointsRequest,
    LogRequest,
    LogResponse,
    RecordUpdate,
    ReportUpdate,
)
from barnraise.agent_client.kv_messages import (
    LOBBY,
    CountResult,
    GetKey,
    GetKeys,
    KvDenied,
    Namespace,
    Operation,
    SetKey,
    SetKeys,
    WatchKey,
)
from barnraise.agent_client.run_options import RunProgram
from barnraise.artifacts.store.manifest import FileEntry, FolderManifest, manifest_id, piece_hash
from barnraise.artifacts.transfer import messages as shipping
from barnraise.artifacts.transfer.messages import (
    LacksPieces,
    ManifestIs,
    PieceData,
    PieceList,
    PieceName,
    WantManifest,
    WantPieces,
)
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId, NodeKey
from barnraise.runs.record import (
    _PURPOSE,
    NodeReport,
    RunRecord,
    RunSpec,
    WorkerSlot,
    WorkerState,
    decode_record,
    read_spec,
    sign_spec,
)
from barnraise.transport.listener.preface import ROUTE_AGENT, ROUTE_AGENT_BULK, ROUTE_AGENT_SHIP
from benchmarks.attacks.tools.guest import Agents
from benchmarks.attacks.tools.run_member import RunMember, until_found
from benchmarks.attacks.tools.toolbox import READY, STRAY, Result, tool

FORGED = b"FORGED"
_NEWEST = 1 << 40
_TERABYTE = 10**12
_encode = msgspec.msgpack.encode
_canonical = msgspec.msgpack.Encoder(order="deterministic").encode


# orders and records


@tool
async def guest_orders(keep: str, agents: Agents, record: str, canary: str) -> Result:
    """Start a run, or change an owner's: by one's own order, in another's name, with other fields."""
    guest, real = RunMember(keep, agents), decode_record(bytes.fromhex(record))
    await guest.come()
    theirs = read_spec(real)
    own = run_spec(guest, "mallory", canary)
    me = tuple(WorkerSlot(node.raw, 0, "cpu") for node in guest.agents)
    later = real.version + 1000
    records = {
        "its own order": sign_spec(own, guest.key),
        "in an owner's name": _forged(replace(own, by=theirs.by), guest.key),
        "the same name": replace(sign_spec(replace(own, run=theirs.run), guest.key), version=later),
        "other slots": replace(real, version=later, generation=real.generation + 1, slots=me * 2),
        "ended": replace(real, version=later, phase="ended"),
        "stopped hard": replace(real, version=later, phase="stopping", hard=True),
        "the newest": replace(real, version=_NEWEST),
        "as it was": real,
    }
    return await _tell_records(guest, records)


@tool
async def owner_orders(keep: str, agents: Agents, record: str, guest: str, canary: str) -> Result:
    """Send run specs that even an owner may not send: in another's name, of an existing run, or a guest's."""
    owner, real = RunMember(keep, agents), decode_record(bytes.fromhex(record))
    await owner.come()
    theirs, lesser = read_spec(real), NodeKey.load_or_create(Path(guest) / "key")
    own = run_spec(owner, "mallory", canary)
    later = real.version + 1000
    records = {
        "in another's name": _forged(replace(own, by=theirs.by), owner.key),
        "the same name": replace(sign_spec(replace(own, run=theirs.run), owner.key), version=later),
        "a guest's order": sign_spec(replace(own, by=lesser.id.raw), lesser),
        "another's order, altered": replace(
            real, order=_canonical(replace(theirs, program=own.program)), version=later
        ),
    }
    return await _tell_records(owner, records)


async def _tell_records(member: RunMember, records: Mapping[str, RunRecord]) -> Result:
    cut = {
        what: await member.are_cut_at(messages.encode(RecordUpdate(record)))
        for what, record in records.items()
    }
    return {"cut": cut, "told": len(records)}


def run_spec(member: RunMember, run: str, canary: str, folder: bytes = bytes(32)) -> RunSpec:
    return RunSpec(
        run=run,
        by=member.key.id.raw,
        at=0.0,
        program=RunProgram(command=("-c", f"open({canary!r}, 'w').close()"), folder=folder),
        nodes=tuple(node.raw for node in member.agents),
    )


def _forged(order: RunSpec, key: NodeKey) -> RunRecord:
    encoded = _canonical(order)
    return RunRecord(order=encoded, signature=key.sign(_PURPOSE + encoded))


# what is not for a guest


@tool
async def guest_asks(
    keep: str, agents: Agents, run: str, generation: int, folder: str, content: str, seconds: float
) -> Result:
    """Ask for the output, files and store keys of a run in which the guest has no part."""
    guest, wanted = RunMember(keep, agents), bytes.fromhex(folder)
    await guest.come()
    names = (PieceName(bytes.fromhex(content), 0), PieceName(os.urandom(32), 7))
    ours = (os.urandom(16), 1, b"")
    scopes = [
        Namespace(run, generation),
        Namespace(run, LOBBY),
        Namespace("@runs", LOBBY),
        Namespace(run, generation + 1),
    ]
    pleas = [
        protocol.GUEST_BOARD + _encode(KvProxyRequest(number, operation, 1.0))
        for number, scope in enumerate(scopes)
        for operation in (
            CountResult(scope, *ours),
            GetKey(scope, *ours, run),
            SetKey(scope, *ours, "key", FORGED),
        )
    ]
    requests: list[shipping.Message] = [
        WantManifest(wanted),
        WantPieces(names, False),
        WantPieces(names, True),
    ]
    for plea in pleas:
        await guest.tell(plea)
    for question in requests:
        await guest.tell(protocol.SHIP + shipping.encode(question), ROUTE_AGENT_SHIP)

    def is_answered() -> bool:
        """Return True if each request that must be answered has its answer."""
        kinds = Counter(map(type, guest.received))
        both = len(guest.agents)
        return kinds[KvProxyReply] >= len(pleas) * both and min(kinds[ManifestIs], kinds[LacksPieces]) >= both

    with contextlib.suppress(TimeoutError):
        await until_found(is_answered)
    await asyncio.sleep(seconds)
    cut = 0
    for rank in range(2):
        cut += await guest.are_cut_at(messages.encode(LogRequest(1, run, generation, rank, 0, 4096)))
    return {
        "lists": [len(message.data) for message in guest.received if isinstance(message, ManifestIs)],
        "pieces": sum(isinstance(message, PieceList) for message in guest.received),
        "lacks": sum(isinstance(message, LacksPieces) for message in guest.received),
        "denied": sum(
            isinstance(message, KvProxyReply) and isinstance(message.result, KvDenied)
            for message in guest.received
        ),
        "allowed": sum(
            isinstance(message, KvProxyReply) and not isinstance(message.result, KvDenied)
            for message in guest.received
        ),
        "output": sum(isinstance(message, LogResponse) for message in guest.received),
        "records": len(guest.records),
        "reports": len(guest.reports),
        "pleas": len(pleas) * len(guest.agents),
        "cut_for_output": cut,
    }


@tool
async def guest_forges_output(keep: str, agents: Agents, serials: int, seconds: float) -> Result:
    """Answer what was asked of others: numbers of questions are easy to guess."""
    guest = RunMember(keep, agents)
    await guest.come()
    READY.get()()
    loop, sent = asyncio.get_running_loop(), 0
    end = loop.time() + seconds
    while loop.time() < end:
        for serial in range(serials):
            await guest.tell(messages.encode(LogResponse(serial, 0, FORGED, len(FORGED))))
            sent += 1
        await asyncio.sleep(0.001)
    return {"sent": sent, "dialled": guest.dialled}


# reports


@tool
async def guest_reports(keep: str, agents: Agents, run: str, generation: int) -> Result:
    """Send reports about a run in which the guest has no part, and reports that no machine makes."""
    guest = RunMember(keep, agents)
    await guest.come()
    ended = tuple(WorkerState(rank, "ended", 1, 0, "made up") for rank in range(2))
    await guest.tell(guest.report(run, "failed", generation=generation, words="made up"))
    await guest.tell(guest.report(run, "ended", generation=generation, workers=ended))
    absurd = {
        "a million workers": guest.report(run, "ended", workers=ended[:1] * 1_000_000)[: 8 << 20],
        "many workers": guest.report(run, "ended", workers=ended[:1] * 250_000),
        "too many workers": guest.report(run, "ended", workers=ended[:1] * 257),
        "a huge word": guest.report(run, "failed", words="w" * 1_000_000),
        "a huge number": guest.report(run, "ready", done_bytes=2**63),
        "another path": guest.report("../../x", "failed"),
        "no stage": guest.report(run, "divine"),
    }
    return {"cut": {what: await guest.are_cut_at(report) for what, report in absurd.items()}}


@tool
async def guest_works(keep: str, agents: Agents, lie: str, seconds: float) -> Result:
    """Take part in the next run that asks for it; once it runs, lie about it for so long."""
    guest = RunMember(keep, agents)
    loop = asyncio.get_running_loop()
    async with guest.beating():
        await guest.come()
        known = set(guest.records)
        READY.get()()
        run = await until_found(lambda: next(iter(set(guest.records) - known), None))
        flood = asyncio.create_task(_flood_lists(guest, run, 8.0 if lie == "lists" else 0.0))
        await guest.tell(guest.report(run, "ready"))
        await until_found(lambda: guest.records[run].phase in ("running", "ended"))
        begun = guest.records[run]
        flood.cancel()
        if lie == "board":
            await _strain_store(guest, run, seconds)
        for message in _lies(guest, begun, run, lie):
            await guest.tell(message)
            await asyncio.sleep(0.05)
        end = loop.time() + seconds
        while guest.records[run].phase != "ended" and loop.time() < end:
            await asyncio.sleep(0.05)
        now = guest.records[run]
        return {
            "run": run,
            "begun": begun.phase,
            "phase": now.phase,
            "generation": now.generation,
            "sentence": (now.outcome.sentence if now.outcome is not None else now.why)[:200],
            "answers": sum(isinstance(message, KvProxyReply) for message in guest.received),
            "dialled": guest.dialled,
            "stalled": guest.stalled,
        }


def _lies(guest: RunMember, record: RunRecord, run: str, lie: str) -> Iterator[bytes]:
    generation, own_ranks = record.generation, record.ranks_of(guest.key.id.raw)
    others = [rank for rank in range(len(record.slots)) if rank not in own_ranks]
    own = tuple(WorkerState(rank, "running") for rank in own_ranks)

    def ends(ranks: Sequence[int], code: int) -> tuple[WorkerState, ...]:
        return tuple(WorkerState(rank, "ended", code, 0, "made up") for rank in ranks)

    def about(stage: str, workers: tuple[WorkerState, ...], words: str = "") -> bytes:
        return guest.report(run, stage, generation=generation, workers=workers, words=words)

    match lie:
        case "others have ended":
            yield about("ended", ends([*own_ranks, *others], 0))
        case "others have failed":
            yield about("ended", (*own, *ends(others, 1)))
        case "no such rank":
            yield about("ended", (*own, *ends([1000, 1024], 1)))
        case "long words":
            yield about("failed", ends(own_ranks, 0), "w" * 4000)
        case "words that command":
            yield about("failed", ends(own_ranks, 0), "\x1b[31mred\x07\x1b]0;title\x07")
        case "contradictions":
            yield about("ready", ends(own_ranks, 0))
            yield about("asks", own * 32)
            yield about("fetching", (*ends(own_ranks, 0), *own, *ends(own_ranks, 0)))
            yield guest.report(run, "running", generation=generation + 7, workers=own)
            yield guest.report(run, "running", generation=0, workers=own, done_bytes=1 << 50, all_bytes=1)


async def _flood_lists(guest: RunMember, run: str, seconds: float) -> None:
    """Send unrequested file lists before the requested machine can answer."""
    folder = read_spec(guest.records[run]).program.folder
    junk = [protocol.SHIP + shipping.encode(ManifestIs(folder, data)) for data in (b"", b"junk")]
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        for message in junk * 50:
            await guest.tell(message, ROUTE_AGENT_SHIP)
        await asyncio.sleep(0.001)


async def _strain_store(guest: RunMember, run: str, seconds: float) -> None:
    """Send store operations of the guest's own run, within and beyond what a worker requests."""
    scope = Namespace(run, guest.records[run].generation)
    client = os.urandom(16)
    operations: list[Operation | WatchKey] = [
        SetKey(scope, client, 2**63 - 1, b"", "k" * 1024, bytes(1 << 19)),
        SetKeys(scope, client, 1, os.urandom(8), ("a", "b", "c"), (b"1",)),
        SetKeys(scope, os.urandom(16), 1, b"", ("a", "b", "c"), (b"1",)),
        GetKeys(scope, client, 2, b"", tuple(f"key {number}" for number in range(50_000))),
        WatchKey(scope, client, 3, b"", ("never",), True),
    ]
    lawful = protocol.GUEST_BOARD + _encode(KvProxyRequest(99, SetKey(scope, client, 0, b"", "k", b"v"), 5.0))
    for _ in range(10):  # again, as an agent would: a link may break
        await guest.tell(lawful)
        with contextlib.suppress(TimeoutError):
            await until_found(
                lambda: any(isinstance(message, KvProxyReply) for message in guest.received), 3.0
            )
            break
    for number, operation in enumerate(operations):
        for patience in (0.0, 1.0, float("nan")):
            await guest.tell(protocol.GUEST_BOARD + _encode(KvProxyRequest(number, operation, patience)))
    await asyncio.sleep(seconds / 2)
    for number in range(2000):
        watch = WatchKey(scope, client, number, b"", (f"never {number}",), True)
        await guest.tell(protocol.GUEST_BOARD + _encode(KvProxyRequest(number, watch, 3600.0)))
    await asyncio.sleep(seconds / 2)


# files


@tool
async def owner_ships(keep: str, agents: Agents, run: str, kind: str, canary: str, seconds: float) -> Result:
    """Order a run of a folder that no honest machine would send, and be its source."""
    owner = RunMember(keep, agents)
    await owner.come()
    content = b"print('shipped')\n"
    listed = _encode(_manifest(kind, content))
    served: list[str] = []

    def answer(node: NodeId, message: object) -> None:
        link = owner.routes[node, ROUTE_AGENT_SHIP]
        if isinstance(message, WantManifest):
            served.append("list")
            with contextlib.suppress(BarnraiseError):
                link.send(protocol.SHIP + shipping.encode(ManifestIs(message.id, listed)))
        elif isinstance(message, WantPieces):
            served.append("pieces")
            wrong = memoryview(content.swapcase())
            pieces = tuple(PieceData(name, wrong) for name in message.names)
            link.send(protocol.SHIP + shipping.encode(PieceList(pieces)))

    owner.on_received = answer
    order = run_spec(owner, run, canary, manifest_id(listed))
    record = sign_spec(order, owner.key)
    await owner.tell(messages.encode(RecordUpdate(record)))
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end and owner.records.get(run, record).phase != "ended":
        with contextlib.suppress(BarnraiseError):
            await owner.come()
        await asyncio.sleep(0.05)
    now = owner.records.get(run, record)
    words = [report.words for (_, name), report in owner.reports.items() if name == run]
    sentence = now.outcome.sentence if now.outcome is not None else now.why
    return {
        "phase": now.phase,
        "sentence": sentence,
        "words": [text for text in words if text],
        "served": len(served),
        "bytes": len(listed),
        "by": owner.key.id.short,
    }


def _manifest(kind: str, content: bytes) -> FolderManifest:
    def entry(path: str, size: int = len(content)) -> FileEntry:
        return FileEntry(path, size, False, (piece_hash(content),))

    names = {
        "above": (f"../../{STRAY}",),
        "far above": (f"a/../../../../{STRAY}",),
        "absolute": (f"/tmp/{STRAY}",),
        "drive": (f"C:/{STRAY}",),
        "backslash": (f"..\\..\\{STRAY}",),
        "stream": ("train.py:hidden",),
        "device": ("folder/NUL.txt",),
        "case": ("Train.py", "train.py"),
        "form": ("caf\u00e9", "cafe\u0301"),
        "under a file": ("link", "link/x"),
        "dot": ("folder/./x",),
        "empty": ("folder//x",),
        "wrong bytes": ("train.py",),
    }
    if kind in names:
        return FolderManifest(tuple(entry(path) for path in sorted(names[kind])))
    match kind:
        case "a terabyte":
            return FolderManifest((entry("data.bin", _TERABYTE),))
        case "many files":
            return FolderManifest(tuple(entry(f"{number:06}") for number in range(120_000)))
        case "a million files":
            return FolderManifest(
                tuple(FileEntry(f"{number:07}", 0, False, ()) for number in range(1_000_000))
            )
        case "not in order":
            return FolderManifest((entry("b"), entry("a")))
    raise ValueError(kind)


# too much


@tool
async def guest_floods(keep: str, agents: Agents, kind: str, seconds: float, deaf: bool) -> Result:
    """Send one kind of request without end; with ``deaf``, without ever reading a response."""
    guest = RunMember(keep, agents)
    victim = next(iter(guest.agents))
    make, route = _requests()[kind]
    loop, sent, dialled = asyncio.get_running_loop(), 0, 0
    READY.get()()
    end = loop.time() + seconds
    while loop.time() < end:
        try:
            await guest.call(victim, ROUTE_AGENT)
            link = await guest.call(victim, route)
            if deaf and link._transport is not None:
                link._transport.pause_reading()
            dialled += 1
            while link.closed is None and loop.time() < end:
                for _ in range(100):
                    link.send(make())
                sent += 100
                await link.drain(2.0)
                await asyncio.sleep(0)
        except BarnraiseError:
            await asyncio.sleep(0.05)
    for link in guest.routes.values():
        link.close("over")
    return {"sent": sent, "dialled": guest.dialled}


def _requests() -> dict[str, tuple[Callable[[], bytes], int]]:
    unknown = tuple(PieceName(os.urandom(32), number) for number in range(1024))
    scope = Namespace("mallory", 1)

    def fresh() -> tuple[PieceName, ...]:
        seed = os.urandom(28)
        return tuple(PieceName(seed + number.to_bytes(4, "big"), 0) for number in range(1024))

    def ship(message: shipping.Message) -> bytes:
        return protocol.SHIP + shipping.encode(message)

    def plea() -> bytes:
        return protocol.GUEST_BOARD + _encode(
            KvProxyRequest(1, CountResult(scope, bytes(16), 1, b""), 3600.0)
        )

    held = messages.encode(HeldCheckpointsRequest(1, ("mallory",) * 16, True))
    wanted_log = messages.encode(LogRequest(1, "mallory", 1, 0, 0, 1 << 18))
    return {
        "want": (lambda: ship(WantPieces(unknown, False)), ROUTE_AGENT_SHIP),
        "want and hold": (lambda: ship(WantPieces(fresh(), True)), ROUTE_AGENT_SHIP),
        "lists": (lambda: ship(WantManifest(os.urandom(32))), ROUTE_AGENT_SHIP),
        "output": (lambda: wanted_log, ROUTE_AGENT_BULK),
        "board": (plea, ROUTE_AGENT_BULK),
        "reports": (lambda: messages.encode(_stranger_report()), ROUTE_AGENT_BULK),
        "checkpoints": (lambda: held, ROUTE_AGENT_BULK),
    }


def _stranger_report() -> ReportUpdate:
    return ReportUpdate(NodeReport(run="mallory", incarnation=os.urandom(16), serial=1, stage="running"))
