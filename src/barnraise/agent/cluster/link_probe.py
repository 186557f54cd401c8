"""Measures this machine and its links, sends the results to others, and keeps the topology graph.

The smaller node id of a pair measures their link over the bulk route and sends the result to all. So does the
larger one if a user asks there. A machine that is busy with another measurement replies so, and is asked
again later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.agent import protocol
from barnraise.agent.context import AgentContext
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId
from barnraise.topology import (
    LinkFacts,
    Machine,
    NodeFacts,
    TopologyGraph,
    build_graph,
    describe_machine,
    measured_speeds,
    with_speeds,
)
from barnraise.topology.graph import Pair, ordered_pair
from barnraise.topology.link_estimate import (
    LARGEST_PIECE,
    MOST_BYTES,
    MOST_SECONDS,
    MeasuredLink,
    estimate,
    next_measurement,
    next_piece,
    why_measure,
)
from barnraise.topology.measurement_slots import MeasurementSlots
from barnraise.topology.probe import remembered_speeds

_PROBE_AFTER_S = 10.0
_PROBES = 3
_FAILED_AGAIN_S = 30.0
_DISTURBED_AGAIN_S = 600.0
_LOOK_S = 2.0
_SETTLE_S = 5.0
_JUDGE_EVERY = 128 * 1024
_MEASURE_S = MOST_SECONDS + 5.0
_MAX_LINKS = 2048
_TOGETHER_S = 0.0005
_MAX_ARRIVALS = 4096

_log = logging.getLogger(__name__)

Serial = Annotated[int, Meta(ge=0, le=2**53)]


class ProbeChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Payload of a bandwidth probe; only its arrival time counts."""

    serial: Serial
    data: Annotated[bytes, Meta(max_length=LARGEST_PIECE)]


class ProbeReceipt(msgspec.Struct, frozen=True, array_like=True, tag="got"):
    """Receipt of a probe: bytes received so far; with ``over`` also the result."""

    serial: Serial
    received: Annotated[int, Meta(ge=0, le=2 * MOST_BYTES)]
    over: bool = False
    mbps: Annotated[float, Meta(ge=0, le=1e7)] | None = None
    reason: Annotated[str, Meta(max_length=200)] = ""
    busy: bool = False  # with another one: nothing was measured


class LinkReport(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """Links that the sender has measured."""

    links: Annotated[tuple[LinkFacts, ...], Meta(max_length=_MAX_LINKS)]


Survey = ProbeChunk | ProbeReceipt | LinkReport
_surveys: msgspec.msgpack.Decoder[Survey] = msgspec.msgpack.Decoder(Survey)
_encoder = msgspec.msgpack.Encoder()


@dataclass
class _ProbeTrain:
    """A measurement that another machine makes of its link to this one."""

    serial: int
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    judged: int = 0
    received: int = 0


class LinkProber:
    """Background measurements of devices and links, while the agent runs."""

    def __init__(self, context: AgentContext, state: Path) -> None:
        self._context = context
        self._state = state
        self._loop = asyncio.get_running_loop()
        described = describe_machine()
        self.machine: Machine = with_speeds(described, remembered_speeds(described, state))
        self._links: dict[Pair, LinkFacts] = {}
        self._measured_at: dict[Pair, float] = {}
        self._last: dict[Pair, MeasuredLink] = {}
        self._requested: set[Pair] = set()
        self._trains: dict[NodeId, _ProbeTrain] = {}
        self._slots = MeasurementSlots()
        self._answers: dict[tuple[NodeId, int], asyncio.Queue[ProbeReceipt]] = {}
        self._serial = 0
        self.busy: frozenset[str] = frozenset()

    def jobs(self) -> list[Callable[[], Awaitable[None]]]:
        """Return the background tasks that the agent has to run."""
        return [self._probe, self._measure_all]

    def graph(self) -> TopologyGraph:
        """Return a snapshot of the topology graph."""
        facts = self._context.node_facts()
        known = {node.node for node in facts}
        links = dict(self._links)
        for link in self._own_links():
            pair = (link.a, link.b)
            old = links.get(pair)
            if old is not None:
                link = msgspec.structs.replace(link, mbps=old.mbps, reason=old.reason or link.reason)
            links[pair] = link
        now = self._loop.time()
        measured = []
        for pair, link in links.items():
            if pair[0] in known and pair[1] in known:
                at = self._measured_at.get(pair)
                ago = now - at if at is not None and link.mbps is not None else None
                measured.append(msgspec.structs.replace(link, measured_s_ago=ago))
        return build_graph(facts, measured)

    def measure_now(self) -> None:
        """Request a measurement of all links of this machine, even during a run."""
        self._requested = {(link.a, link.b) for link in self._own_links()}

    def send_measured(self, node: NodeId) -> None:
        """Send the measured links of this machine to a newly connected machine."""
        own = self._context.me.raw.hex()
        links = [link for pair, link in self._links.items() if own in pair]
        if links:
            self._context.send_bulk(node, _encode(LinkReport(tuple(links))))

    def received(self, node: NodeId, body: bytes | memoryview) -> None:
        """Handle a message of another machine's prober."""
        message = protocol.decode(_surveys, body)
        match message:
            case ProbeChunk():
                self._on_chunk(node, message)
            case ProbeReceipt():
                queue = self._answers.get((node, message.serial))
                if queue is not None and queue.qsize() < 1000:
                    queue.put_nowait(message)
            case LinkReport():
                self._on_report(node, message)

    def _own_links(self) -> list[LinkFacts]:
        own = self._context.me.raw.hex()
        links = []
        for node in self._context.linked_nodes():
            trip = self._context.round_trip(node)
            if trip is not None:
                a, b = ordered_pair(own, node.raw.hex())
                address = self._context.link_address(node)
                links.append(
                    LinkFacts(a=a, b=b, rtt_s=trip[0], rtt_deviation_s=trip[1], address=address[:64])
                )
        return links

    async def _probe(self) -> None:
        """Measure the devices; retry later if the machine was busy."""
        await asyncio.sleep(_PROBE_AFTER_S)
        for _ in range(_PROBES):
            self._slots.is_probing = True
            try:
                described = await asyncio.to_thread(describe_machine)  # slow where processors are emulated
                report = await measured_speeds(described, self._state)
            finally:
                self._slots.is_probing = False
            machine = with_speeds(await asyncio.to_thread(describe_machine), report)
            if machine != self.machine:
                self.machine = machine
                self._context.machine_changed()
            if report.speeds and not report.disturbed:
                return
            await asyncio.sleep(_DISTURBED_AGAIN_S if report.speeds else _FAILED_AGAIN_S)
            while machine.torch is None and (await asyncio.to_thread(describe_machine)).torch is None:
                await asyncio.sleep(_FAILED_AGAIN_S)  # a user may install it while the agent runs

    async def _measure_all(self) -> None:
        await asyncio.sleep(_SETTLE_S)
        while True:
            own = self._context.me.raw.hex()
            now = self._loop.time()
            links = [
                link for link in self._own_links() if link.a == own or (link.a, link.b) in self._requested
            ]
            due = [link for link in links if not self._slots.is_put_off(_other_end(link, own), now)]
            graph = build_graph([NodeFacts(node=name, name="x") for name in _ends(due)], due)
            under_way = [ordered_pair(own, node) for node in self._slots.measured_by(now)]
            pair = next_measurement(
                graph, now, self.busy, self._last, under_way=under_way, requested=self._requested
            )
            if pair is None or self._slots.is_probing:
                await asyncio.sleep(_LOOK_S)
                continue
            link = graph.link(*pair)
            assert link is not None
            why = why_measure(link, self._last.get(pair), now) or "a user asked"
            if await self._measure(pair, link, why):
                self._requested.discard(pair)
            await asyncio.sleep(_LOOK_S / 2)

    async def _measure(self, pair: Pair, link: LinkFacts, why: str) -> bool:
        """Measure a link; return False if the other machine was busy."""
        name = _other_end(link, self._context.me.raw.hex())
        node = NodeId(bytes.fromhex(name))
        mbps: float | Literal["busy"] | None = None
        self._slots.is_sending = True
        try:
            async with asyncio.timeout(_MEASURE_S):
                mbps = await self._send_train(node)
        except (TimeoutError, BarnraiseError) as error:
            reason = error.message if isinstance(error, BarnraiseError) else "no answer in time"
            _log.info("the link to %s could not be measured: %s", node.short, reason)
        finally:
            self._slots.is_sending = False
        if mbps == "busy":
            self._slots.put_off(name, self._loop.time())
            return False
        self._last[pair] = MeasuredLink(self._loop.time(), link.rtt_s, mbps is not None)
        if mbps is None:
            return True
        facts = msgspec.structs.replace(link, mbps=mbps, reason=f"measured because {why}"[:200])
        self._links[pair] = facts
        self._measured_at[pair] = self._loop.time()
        for other in self._context.linked_nodes():
            self._context.send_bulk(other, _encode(LinkReport((facts,))))
        return True

    async def _send_train(self, node: NodeId) -> float | Literal["busy"] | None:
        """Send at most a second of traffic and return the bandwidth.

        The bytes in flight never exceed what the link transfers in a moment.
        """
        self._serial += 1
        serial = self._serial
        queue = self._answers[node, serial] = asyncio.Queue()
        payload = bytes(LARGEST_PIECE)
        sent = received = 0
        ended = False
        started = self._loop.time()
        try:
            while True:
                while (size := next_piece(sent, received, self._loop.time() - started)) > 0:
                    self._context.send_bulk(node, _encode(ProbeChunk(serial, payload[:size])))
                    sent += size
                    await asyncio.sleep(0)
                if not ended and (self._loop.time() - started > MOST_SECONDS or sent >= MOST_BYTES):
                    ended = True
                    self._context.send_bulk(node, _encode(ProbeChunk(serial, b"")))
                receipt = await queue.get()
                received = max(received, receipt.received)
                if receipt.busy:
                    return "busy"  # with another measurement
                if receipt.over:
                    return receipt.mbps
        finally:
            del self._answers[node, serial]

    def _on_chunk(self, node: NodeId, chunk: ProbeChunk) -> None:
        name = node.raw.hex()
        decision = self._slots.arrives(name, chunk.serial, self._loop.time())
        if decision == "declined":
            self._context.send_bulk(node, _encode(ProbeReceipt(chunk.serial, 0, over=True, busy=True)))
        if decision != "counts":
            return
        train = self._trains.get(node)
        if train is None or train.serial != chunk.serial:
            train = self._trains[node] = _ProbeTrain(chunk.serial)
        size = len(chunk.data)
        if train.received + size > MOST_BYTES:
            return
        train.received += size
        self._note_arrival(train, size)
        last = not size
        if not last and train.received - train.judged < _JUDGE_EVERY:
            self._context.send_bulk(node, _encode(ProbeReceipt(train.serial, train.received)))
            return
        train.judged = train.received
        result = estimate(train.arrivals)
        over = last or result.enough
        receipt = ProbeReceipt(
            train.serial, train.received, over, result.mbps if over else None, result.reason[:200]
        )
        self._context.send_bulk(node, _encode(receipt))
        if over:
            self._trains[node] = _ProbeTrain(-1)
            self._slots.over(name)

    def _note_arrival(self, train: _ProbeTrain, size: int) -> None:
        """Merge chunks that arrive together, so that memory is bounded by time and not by the sender."""
        now = self._loop.time()
        if train.arrivals and now - train.arrivals[-1][0] < _TOGETHER_S:
            train.arrivals[-1] = (train.arrivals[-1][0], train.arrivals[-1][1] + size)
        elif len(train.arrivals) < _MAX_ARRIVALS:
            train.arrivals.append((now, size))

    def _on_report(self, node: NodeId, report: LinkReport) -> None:
        name = node.raw.hex()
        known = {facts.node for facts in self._context.node_facts()}
        for link in report.links:
            pair = (link.a, link.b)
            # A machine may report its own links only.
            if name not in pair or not known.issuperset(pair):
                continue
            if len(self._links) < _MAX_LINKS or pair in self._links:
                self._links[pair] = link
                self._measured_at[pair] = self._loop.time() - (link.measured_s_ago or 0.0)


def _encode(message: Survey) -> bytes:
    return protocol.TRAIN + _encoder.encode(message)


def _other_end(link: LinkFacts, own: str) -> str:
    return link.b if link.a == own else link.a


def _ends(links: list[LinkFacts]) -> set[str]:
    return {name for link in links for name in (link.a, link.b)}
