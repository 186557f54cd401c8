"""Event loop of the communication process: gives the engine its sockets, memory and clock."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import sys
import time
from pathlib import Path

import psutil

from barnraise.agent_client import ListenerClient, register_worker
from barnraise.agent_client.machine_limits import SEND_MBPS_VARIABLE
from barnraise.collectives.comm_process.engine import CommEngine
from barnraise.collectives.comm_process.links.connect import Connections, extra_stream_count
from barnraise.collectives.comm_process.links.handshakes import (
    MAX_EXTRA_STREAMS,
    EstablishedLink,
    HandshakeSecurity,
)
from barnraise.collectives.comm_process.links.traffic import TrafficTotals
from barnraise.collectives.comm_process.peers import Clocks
from barnraise.collectives.messages import (
    Alive,
    AskStatistics,
    CommProcessReady,
    Failure,
    GroupMember,
    Inbox,
    MapSegment,
    OperationFailed,
    OperationFinished,
    Reply,
    StartOperation,
    StartRefused,
    Statistics,
    UnmapSegment,
    encode,
)
from barnraise.collectives.shm.segment import SharedSegment
from barnraise.core import metrics
from barnraise.core.config import Settings
from barnraise.core.errors import BarnraiseError, ListenerError, ProtocolError
from barnraise.core.flow.uplink_limiter import UplinkLimiter
from barnraise.core.metrics import catalogue
from barnraise.identity.node_id import NodeId
from barnraise.transport.ipc.dial_request import BROKER_VARIABLE
from barnraise.transport.ipc.messages import TrustUpdate
from barnraise.transport.links.frames import FrameHeader, FrameKind
from barnraise.transport.links.link import Link
from barnraise.transport.links.parallel_streams import (
    ParallelStream,
    ParallelStreamReport,
    ParallelStreamReports,
)
from barnraise.transport.links.stream import StreamLink, tune

log = logging.getLogger("barnraise.comm_process")

_TICK_S = 0.2
_GOODBYE_S = 0.3
_BYTES_PER_MBIT = 125_000
_READ_BYTES = 256 << 10


class CommProcess:
    """Owner of every descriptor. It performs what the engine decides."""

    def __init__(
        self, channel: socket.socket, direct: socket.socket, settings: Settings, run: str, generation: int
    ) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._direct = direct  # replies for callers that wait themselves; also carries descriptors
        self._direct_operations: set[int] = set()
        self._settings = settings
        self._inbox = Inbox(commands=True)
        self._outbox = bytearray()
        self._segments: dict[int, SharedSegment] = {}
        self._selector = selectors.DefaultSelector()
        self._readable_links: set[StreamLink] = set()
        self._blocked: set[StreamLink] = set()
        self._worker_process = psutil.Process(os.getppid())
        self._stopped_since: float | None = None
        self._uplink = UplinkLimiter(float(os.environ.get(SEND_MBPS_VARIABLE, "0")) * _BYTES_PER_MBIT)
        self._turn = 0
        self._leaving = False
        self._dialled: dict[bytes, GroupMember] = {}
        self._reports = ParallelStreamReports()
        self._traffic = TrafficTotals()
        self._links_by_stream: dict[ParallelStream, StreamLink] = {}
        self._nodes: dict[Link, NodeId | None] = {}  # another machine must not take over a worker's id
        self._listener, self._engine, self._connections = self._register(run, generation)
        self._selector.register(channel, selectors.EVENT_READ, self._channel_ready)
        self._selector.register(self._reports.fileno(), selectors.EVENT_READ, self._streams_ready)

    def _register(self, run: str, generation: int) -> tuple[ListenerClient, CommEngine, Connections]:
        settings = self._settings
        listener, ticket = register_worker(settings, run, generation)
        self._credentials = ticket.credentials
        plaintext = ticket.encryption == "plaintext"
        if plaintext:
            log.info("links are in PLAINTEXT (network.encryption): use this only in a network you trust")
        security = self._trust(ticket.trusted, ticket.secret, plaintext=plaintext)
        clocks = Clocks(settings.link.heartbeat_s, settings.link.silence_s)
        engine = CommEngine(ticket.worker, ticket.run, ticket.generation, clocks, self)
        connections = Connections(
            self._selector, security, settings.network, self._connected, engine.unreachable
        )
        self._selector.register(listener.fileno(), selectors.EVENT_READ, self._listener_ready)
        member = GroupMember(ticket.worker, ticket.port, tuple(ticket.addresses))
        self.reply(CommProcessReady(member, ticket.run, ticket.generation, ticket.encryption))
        return listener, engine, connections

    def _trust(self, trusted: list[bytes], secret: bytes, *, plaintext: bool) -> HandshakeSecurity:
        nodes = [NodeId(raw) for raw in trusted]
        self._trusted = frozenset(nodes)
        broker = os.environ.get(BROKER_VARIABLE)
        return HandshakeSecurity.of(
            self._credentials, nodes, secret, plaintext=plaintext, broker=Path(broker) if broker else None
        )

    # environment of the engine

    def now(self) -> float:
        return time.monotonic()

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def reply(self, message: Reply) -> None:
        if (
            isinstance(message, OperationFinished | OperationFailed)
            and message.operation in self._direct_operations
        ):
            self._direct_operations.discard(message.operation)
            # only one small message is in flight here: it always fits
            with contextlib.suppress(OSError):
                self._direct.send(encode(message))
            return
        self._outbox += encode(message)

    def dial(self, member: GroupMember) -> None:
        self._dialled[member.worker] = member
        self._connections.dial(member)

    def memory(self, segment: int, offset: int, size: int) -> memoryview:
        return self._segments[segment].view[offset : offset + size]

    # event loop

    def serve(self) -> None:
        """Run the event loop until the worker exits."""
        next_tick = self.now()
        while not self._leaving:
            now = self.now()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + _TICK_S
            self._flush()
            wait = 0.0 if self._readable_links else max(0.0, next_tick - self.now())
            if self._uplink.is_limited:
                wait = min(wait, self._uplink.free_in(self.now()) or wait)
            for link in list(self._readable_links):
                self._read_link(link)
            for key, events in self._selector.select(wait):
                if isinstance(key.data, StreamLink):
                    self._link_ready(key.data, events)
                else:
                    key.data()
        self._say_goodbye()

    def _tick(self, now: float) -> None:
        rate = self._engine.peers.seconds_per_byte
        for peer in self._engine.peers:
            if isinstance(peer.link, StreamLink) and peer.link.closed is None:
                if rate is not None:
                    peer.link.expect_rate(peer.seconds_per_byte or rate)
                if peer.link.sleeps_through:
                    self._read_link(peer.link)
        self._engine.tick()
        self._connections.tick(now)
        self._open_extra_streams()
        self._watch_worker(now)
        self._remove_closed_links()
        self.reply(Alive())

    def _watch_worker(self, now: float) -> None:
        """Fail all groups if the worker is stopped (SIGSTOP), and leave if it has exited."""
        try:
            status = self._worker_process.status()
        except psutil.Error:
            status = psutil.STATUS_ZOMBIE
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            self._leaving = True
            return
        stopped = status == psutil.STATUS_STOPPED
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since >= self._settings.link.silence_s - _TICK_S:
            silence = self._settings.link.silence_s
            self._engine.fail_all(f"its training process has been stopped for {silence:g} s")

    def _flush(self) -> None:
        peers = list(self._engine.peers)
        if self._uplink.is_limited and peers:  # by turns, or the first one would get all
            self._turn = (self._turn + 1) % len(peers)
            peers = peers[self._turn :] + peers[: self._turn]
        for peer in peers:
            link = peer.link
            if isinstance(link, StreamLink) and link.writer.pending and link not in self._blocked:
                if self._flush_link(link):
                    self._blocked.add(link)
                    self._set_events(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
                elif link.closed is not None:
                    self._remove_link(link)
        if self._outbox:
            try:
                sent = self._channel.send(self._outbox)
                del self._outbox[:sent]
            except BlockingIOError:
                pass  # the worker is slow to read; retry in the next iteration
            except OSError:
                self._leaving = True

    def _flush_link(self, link: StreamLink) -> bool:
        """Send what the limit of this machine allows; return True if the link blocks."""
        if not self._uplink.is_limited or self._is_on_this_machine(link):
            return link.flush()
        if self._uplink.free_in(self.now()):
            return False  # the loop comes back in time
        before = link.bytes_out
        is_left = link.flush(self._uplink.burst_bytes)
        self._uplink.delay(link.bytes_out - before, self.now())
        return is_left and not self._uplink.free_in(self.now())

    def _is_on_this_machine(self, link: StreamLink) -> bool:
        node = self._nodes.get(link)
        return node is not None and node.raw == self._credentials.node

    def _link_ready(self, link: StreamLink, events: int) -> None:
        if events & selectors.EVENT_WRITE and link.closed is None:
            self._blocked.discard(link)
            if self._flush_link(link):
                self._blocked.add(link)
            else:
                self._set_events(link, selectors.EVENT_READ)
        if events & selectors.EVENT_READ and link.closed is None:
            self._read_link(link)
        if link.closed is not None:
            self._remove_link(link)

    def _read_link(self, link: StreamLink) -> None:
        self._readable_links.discard(link)
        if link.closed is None and link.receive():
            self._readable_links.add(link)
        if link.closed is not None:
            self._remove_link(link)

    def _set_events(self, link: StreamLink, events: int) -> None:
        if link.closed is None:
            self._selector.modify(link.fileno(), events, link)

    def _connected(self, connected: EstablishedLink) -> None:
        worker, sock = connected.worker, connected.socket
        if connected.node is not None and connected.node not in self._trusted:
            log.warning("rejected worker %s: its machine is not trusted any more", worker.hex()[:8])
            sock.close()
            return
        existing = self._engine.peers.get(worker)
        if existing is not None and self._nodes.get(existing.link) != connected.node:
            log.warning("rejected another machine that claims to be worker %s", worker.hex()[:8])
            sock.close()
            return
        if connected.stream:
            self._add_stream(existing.link if existing is not None else None, sock)
            return
        if existing is not None and isinstance(existing.link, StreamLink):
            existing.link.close("it connected again")
            self._remove_closed_links()
        tune(sock, self._settings.link.silence_s)
        link = StreamLink(sock, self._engine)
        link.sends_on_lanes = not self._uplink.is_limited  # their threads do not wait for turns
        self._nodes[link] = connected.node
        metrics.counter(catalogue.LINKS_OPENED).inc()
        self._selector.register(link.fileno(), selectors.EVENT_READ, link)
        self._readable_links.add(link)  # TLS may hold bytes already
        self._engine.link_up(worker, link, connected.node.raw if connected.node is not None else b"")

    def _add_stream(self, link: Link | None, sock: socket.socket) -> None:
        if not isinstance(link, StreamLink) or len(link.lanes) >= MAX_EXTRA_STREAMS:
            sock.close()
            return
        tune(sock, self._settings.link.silence_s)
        stream = ParallelStream(sock, self._reports)
        self._links_by_stream[stream] = link
        link.lanes.append(stream)

    def _open_extra_streams(self) -> None:
        """Open parallel streams if one core's encryption is the limit, or as many as the settings say."""
        for peer in self._engine.peers:
            link, member = peer.link, self._dialled.get(peer.worker)
            if member is None or not isinstance(link, StreamLink):
                continue
            if self._uplink.is_limited:
                continue
            count = extra_stream_count(
                self._settings.network.streams, os.cpu_count() or 1, peer.seconds_per_byte
            )
            at = GroupMember(member.worker, member.port, (link.address,))
            for stream in range(len(link.lanes) + 1, count + 1):
                self._connections.dial(at, stream)

    def _streams_ready(self) -> None:
        for report in self._reports.take():
            link = self._links_by_stream.get(report.lane)
            if link is None or link.closed is not None:
                report.lane.close()
                self._links_by_stream.pop(report.lane, None)
                continue
            try:
                self._handle_stream_report(link, report)
            except ProtocolError as error:
                link.close(f"it broke the protocol: {error.message}")
        self._remove_closed_links()

    def _handle_stream_report(self, link: StreamLink, report: ParallelStreamReport) -> None:
        if report.kind == "arriving" and report.header is not None:
            report.lane.place(self._engine.target(link, report.header))
        elif report.kind == "arrived" and report.header is not None and report.payload is not None:
            link.bytes_in += report.header.length
            self._engine.frame(link, report.header, report.payload)
        elif report.kind == "sent":
            self._engine.sent(link, report.token)
        else:
            link.close(report.why)

    def _remove_link(self, link: StreamLink) -> None:
        """Forget a closed link. Its descriptor is removed from the selector by number."""
        for descriptor, key in list(self._selector.get_map().items()):
            if key.data is link:
                self._selector.unregister(descriptor)
        self._readable_links.discard(link)
        self._blocked.discard(link)
        for stream in link.lanes:
            self._links_by_stream.pop(stream, None)
        if link in self._nodes:
            metrics.counter(catalogue.LINKS_LOST).inc()
            self._traffic.close(link)
            del self._nodes[link]
        self._engine.link_down(link)

    def _remove_closed_links(self) -> None:
        for peer in self._engine.peers:
            if isinstance(peer.link, StreamLink) and peer.link.closed is not None:
                self._remove_link(peer.link)

    # worker and listener

    def _channel_ready(self) -> None:
        try:
            data = self._channel.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leaving = True
            return
        for message in self._inbox.feed(data):
            if isinstance(message, MapSegment):
                descriptor = self._receive_descriptor() if sys.platform != "win32" else -1
                self._segments[message.segment] = SharedSegment.attach(message.size, descriptor, message.name)
            elif isinstance(message, UnmapSegment):
                segment = self._segments.pop(message.segment, None)
                if segment is not None:
                    segment.close()
            elif isinstance(message, AskStatistics):
                self.reply(self._statistics(message.request))
            else:
                if isinstance(message, StartOperation) and message.direct:
                    self._direct_operations.add(message.operation)
                self._engine.command(message)  # type: ignore[arg-type]

    def _receive_descriptor(self) -> int:
        """Receive a segment's descriptor, which was sent before the message that names it."""
        if sys.platform == "win32":
            raise NotImplementedError
        self._direct.setblocking(True)
        try:
            return socket.recv_fds(self._direct, 1, 1)[1][0]
        finally:
            self._direct.setblocking(False)

    def _listener_ready(self) -> None:
        descriptor = self._listener.fileno()
        try:
            while (received := self._listener.receive()) is not None:
                if isinstance(received, TrustUpdate):
                    self._change_trust(received)
                else:
                    self._connections.accept(received[1], received[0])
        except (ListenerError, ProtocolError) as error:
            # existing links continue; new ones cannot be accepted
            log.warning("the listener is gone: %s", error)
            self._selector.unregister(descriptor)

    def _change_trust(self, update: TrustUpdate) -> None:
        """Use the new trust for later handshakes, and cut the links to machines that it lacks."""
        plaintext = self._connections.security.plaintext
        self._connections.security = self._trust(update.trusted, update.secret, plaintext=plaintext)
        for peer in self._engine.peers:
            node = self._nodes.get(peer.link)
            if node is not None and node not in self._trusted and isinstance(peer.link, StreamLink):
                peer.link.close("its machine was removed from the cluster")
        self._remove_closed_links()

    def _statistics(self, request: int) -> Statistics:
        engine, process = self._engine, psutil.Process()
        links = list(engine.peers)
        streams = [peer.link for peer in links if isinstance(peer.link, StreamLink)]
        sent, received, retransmits = self._traffic.sample(streams)
        trips = [peer.round_trip_s for peer in links if peer.round_trip_s is not None]
        values = {sample.name: sample.value for sample in metrics.registry.samples()}
        values |= {
            catalogue.LINKS_OPEN.name: float(len(links)),
            catalogue.WIRE_SENT.name: float(sent),
            catalogue.WIRE_RECEIVED.name: float(received),
            catalogue.COMM_OPERATIONS.name: float(engine.operations),
            catalogue.COMM_FAILURES.name: float(engine.failures),
            catalogue.COMM_CPU.name: time.process_time(),
            catalogue.COMM_MEMORY.name: float(process.memory_info().rss),
        }
        if sys.platform == "linux":
            values[catalogue.RETRANSMITS.name] = float(retransmits)
        if trips:
            values[catalogue.LINK_ROUND_TRIP.name] = max(trips)
        return Statistics(request, values, tuple(peer.link.description for peer in links))

    def _say_goodbye(self) -> None:
        """Tell all peers that the worker exited, so that they do not wait for a silence."""
        for peer in self._engine.peers:
            if peer.link.closed is None:
                peer.link.send(FrameHeader(FrameKind.GOODBYE), b"its process exited")
        deadline = self.now() + _GOODBYE_S
        for peer in self._engine.peers:
            while peer.link.closed is None and peer.link.flush() and self.now() < deadline:
                time.sleep(0.002)
            peer.link.close("this process exited")


def report_start_error(channel: socket.socket, error: BarnraiseError) -> None:
    """Report to the worker why its communication process cannot start."""
    with contextlib.suppress(OSError):
        channel.setblocking(True)
        channel.sendall(encode(StartRefused(Failure(error.code, f"{error.message} ({error.hint})"))))
