"""Group setup: all ranks join, links are measured once, and all ranks get rank 0's cost table. No I/O.

With one table from one rank, two ranks cannot choose different algorithms.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import msgspec

from barnraise.collectives.algorithms.cost_model import CostTable, merge_tables
from barnraise.collectives.comm_process.group import Group
from barnraise.collectives.comm_process.peers import PeerLink, Peers
from barnraise.collectives.messages import GroupOpened, Reply
from barnraise.core.errors import ProtocolError
from barnraise.transport.links.frames import FrameHeader, FrameKind

_FIRST_PROBE = (1, 64 << 10)  # frames, bytes each
_SECOND_PROBE = (8, 256 << 10)  # only if the first was too short to measure
_SHORT_S = 0.005
_MAX_PROBES = 64  # an honest peer sends two
_RESULT = struct.Struct("<Qd")
_ZEROS = memoryview(bytes(256 << 10))


class ReplySink(Protocol):
    def now(self) -> float: ...
    def reply(self, message: Reply) -> None: ...


class GroupSetup:
    """Drives every group from the first join to ``GroupOpened``."""

    def __init__(self, peers: Peers, world: ReplySink, opened: Callable[[Group], None]) -> None:
        self._peers = peers
        self._environment = world
        self._opened = opened
        self._probe_scratch = memoryview(bytearray(_SECOND_PROBE[1]))

    def advance(self, group: Group) -> None:
        """Perform the steps that are possible now. Calling it at any time is harmless."""
        if group.opened or group.failure is not None or len(group.joined) < group.world - 1:
            return
        if group.world == 1 and group.table is None:
            group.table = CostTable.default()
        elif group.world > 1 and not group.agreed:
            self._measure(group)
        if group.table is not None and (group.agreed or group.world == 1):
            self._finish(group)

    def table_frame(self, group: Group, rank: int, kind: FrameKind, payload: bytes) -> None:
        try:
            table = msgspec.msgpack.decode(payload, type=CostTable)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError("malformed cost table") from error
        if kind is FrameKind.TABLE:
            if rank != 0:
                raise ProtocolError("a cost table must come from rank 0")
            group.table, group.agreed = table, True
        else:
            group.measures[rank] = table
        self.advance(group)

    def probe_space(self, peer: PeerLink, header: FrameHeader) -> memoryview:
        if header.length > len(self._probe_scratch):
            raise ProtocolError("a probe is too large")
        return self._probe_scratch[: header.length]

    def probe_frame(self, peer: PeerLink, header: FrameHeader, payload: memoryview) -> None:
        now = self._environment.now()
        if header.kind is FrameKind.PROBE:
            if header.first == 0:
                peer.probe_began, peer.probe_bytes = now, 0
            else:
                peer.probe_bytes += header.length
            if header.first + 1 == header.second:
                peer.probes_answered += 1
                if peer.probes_answered > _MAX_PROBES:
                    raise ProtocolError("another rank sent too many probes")
                result = _RESULT.pack(peer.probe_bytes, now - peer.probe_began)
                peer.link.send(FrameHeader(FrameKind.PROBED), result)
        elif len(payload) != _RESULT.size:
            raise ProtocolError("malformed probe result")
        else:
            size, seconds = _RESULT.unpack(payload)
            self._probed(peer, size, seconds, now)

    def _probed(self, peer: PeerLink, size: int, seconds: float, now: float) -> None:
        if peer.probing_since is None:
            return
        elapsed = now - peer.probing_since
        round_trip = peer.round_trip_s or 0.0
        peer.probing_since = None
        if size and seconds >= 0:  # 0 where the clock is coarse
            peer.seconds_per_byte = min(max(seconds / size, 1e-12), 1.0)
        elif elapsed - round_trip < _SHORT_S:
            self._probe(peer, _SECOND_PROBE)
        else:
            peer.seconds_per_byte = (elapsed - round_trip) / (_FIRST_PROBE[0] * _FIRST_PROBE[1])

    def _probe(self, peer: PeerLink, probe: tuple[int, int]) -> None:
        count, size = probe
        peer.probing_since = self._environment.now()
        for index in range(count):
            peer.link.send_bulk(FrameHeader(FrameKind.PROBE, first=index, second=count), _ZEROS[:size], None)

    def _measure(self, group: Group) -> None:
        if not group.measured:
            measure = group.table or self._own_measure(group)
            if measure is None:
                return
            group.measured = True
            if group.rank == 0:
                group.measures[0] = measure
            else:
                self._send(group, 0, FrameKind.MEASURE, measure)
        if group.rank == 0 and (group.table is not None or len(group.measures) == group.world):
            group.table = group.table or merge_tables(group.measures.values())
            group.agreed = True
            for rank in group.others():
                self._send(group, rank, FrameKind.TABLE, group.table)

    def _own_measure(self, group: Group) -> CostTable | None:
        """Return this rank's measurement of its links, or None while it is measured."""
        peers = [self._peers.get(group.workers[rank]) for rank in group.others()]
        known = [peer for peer in peers if peer is not None]
        if len(known) < len(peers) or not all(peer.measured for peer in known):
            return None
        following = self._peers.get(group.workers[(group.rank + 1) % group.world])
        assert following is not None
        if following.seconds_per_byte is None:
            if following.probing_since is None:
                self._probe(following, _FIRST_PROBE)
            return None
        latency = max(peer.round_trip_s or 0.0 for peer in known) / 2
        return CostTable.measured(latency, following.seconds_per_byte)

    def _send(self, group: Group, rank: int, kind: FrameKind, table: CostTable) -> None:
        peer = self._peers.get(group.workers[rank])
        if peer is not None:
            peer.link.send(FrameHeader(kind, group=group.tag), msgspec.msgpack.encode(table))

    def _finish(self, group: Group) -> None:
        assert group.table is not None
        group.opened = True
        peers = [self._peers.get(group.workers[rank]) for rank in group.others()]
        links = tuple(peer.link.description for peer in peers if peer is not None)
        nodes = tuple(peer.node if peer is not None else b"" for peer in peers)
        self._environment.reply(GroupOpened(group.command.request, group.tag, group.table, links, nodes))
        self._opened(group)
