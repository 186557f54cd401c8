"""Speeds of the machines of a group, and of the links between them, as every member knows them.

The agents measure links while no run is there. What they have not measured is measured here once, with the
activations' size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta

from barnraise.core.errors import BarnraiseError, CollectiveError
from barnraise.core.units import format_rate
from barnraise.planning.split.stage_time import BlockSpeed, LinkRates
from barnraise.topology.graph import TopologyGraph
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.machine_memory import free_memory
from barnraise.training.pipeline.members.refusals import read_reports, refuse
from barnraise.training.pipeline.prediction.plausible import (
    possible_latency,
    possible_rate,
    possible_speed,
)

log = logging.getLogger("barnraise.training")

MOST_MEMBERS = 1024
_BYTES_PER_MBIT = 1e6 / 8
_LOCAL_RATE = 1e9  # bytes per second between two workers of one machine
_LEAST, _MOST = 1 << 16, 1 << 22  # bytes of a message that measures a link
_SHORT = 8

Pair = tuple[int, int]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]


class MemberSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Report of a member of a group: its machine, and its links to each rank; 0: unknown.

    The seconds are those of a `BlockSpeed`. ``rates``: bytes per second from this machine. ``latencies``: one
    way. ``host_bytes``: memory of the computer beside that of the accelerator. ``host_rate``: bytes per
    second from there. ``block_kept_bytes`` and ``after_kept_bytes``: what a micro-batch keeps of a block for
    the backward pass, and of the part after the blocks.
    """

    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    before_s: Seconds = 0.0
    after_s: Seconds = 0.0
    around_s: Seconds = 0.0
    rates: Annotated[tuple[Rate, ...], Meta(max_length=MOST_MEMBERS)] = ()
    latencies: Annotated[tuple[Seconds, ...], Meta(max_length=MOST_MEMBERS)] = ()
    host_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    host_rate: Rate = 0.0
    block_kept_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    after_kept_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0

    @property
    def block(self) -> BlockSpeed:
        """Return the seconds of this member's blocks."""
        return BlockSpeed(self.forward_s, self.backward_s, self.before_s, self.after_s, self.around_s)


class GroupSpeeds(NamedTuple):
    """Reports of all members by rank, and the links between them."""

    members: tuple[MemberSpeed, ...]
    links: LinkRates


_speeds = msgspec.msgpack.Decoder(MemberSpeed)


class LinkMeter:
    """Rates of the links of this worker's machine, by the other machine. It keeps what it has measured."""

    def __init__(self, manager: GroupManager, sent_bytes: int) -> None:
        self._manager = manager
        self._bytes = min(max(sent_bytes, _LEAST), _MOST)
        self._measured: dict[str, tuple[float, float]] = {}  # rate and latency by machine

    def exchange(self, own: MemberSpeed) -> GroupSpeeds:
        """Return the speeds of all members; links that nothing has measured yet are measured now."""
        nodes, rank = self._manager.machines(), self._manager.rank
        rates, latencies = known_links(self._survey(), nodes, rank)
        for place, node in enumerate(nodes):
            if node in self._measured and node != nodes[rank]:
                rates[place], latencies[place] = self._measured[node]
        own = msgspec.structs.replace(own, rates=tuple(rates), latencies=tuple(latencies))
        members = self._gather(own)
        rounds = rounds_of(unknown_pairs(members))
        if rounds:
            for pairs in rounds:
                for pair in pairs:
                    if rank in pair:
                        peer = sum(pair) - rank
                        self._measured[nodes[peer]] = self._measure(peer, leads=rank == pair[0])
                        rates[peer], latencies[peer] = self._measured[nodes[peer]]
            members = self._gather(
                msgspec.structs.replace(own, rates=tuple(rates), latencies=tuple(latencies))
            )
        return GroupSpeeds(tuple(members), combine_links(members))

    def _survey(self) -> TopologyGraph:
        try:
            return self._manager.survey()
        except CollectiveError:
            raise
        except BarnraiseError as error:
            log.info("the agent does not tell the links: %s", error.message)
            return TopologyGraph()

    def _gather(self, own: MemberSpeed) -> list[MemberSpeed]:
        messages = self._manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
        members = read_reports(self._manager, _speeds, messages)
        count = len(members)
        refuse(
            self._manager,
            {
                rank: f"it reports {len(each.rates)} and {len(each.latencies)} links, and there are {count}"
                for rank, each in enumerate(members)
                if {len(each.rates), len(each.latencies)} != {count}
            },
        )
        return [self._possible(rank, each) for rank, each in enumerate(members)]

    def _possible(self, rank: int, reported: MemberSpeed) -> MemberSpeed:
        possible = possible_report(reported)
        if possible != reported:
            name = self._manager.name_of(rank)
            log.warning("%s reports speeds that no machine has; the nearest possible ones count", name)
        return possible

    def _measure(self, peer: int, *, leads: bool) -> tuple[float, float]:
        """Return rate and latency to a peer, which measures too; ``leads``: this one is first."""
        rate = latency_s = 0.0
        for is_sender in (leads, not leads):
            if is_sender:
                rate, latency_s = self._measure_sending(peer)
            else:
                self._answer(peer)
        name = self._manager.name_of(peer)
        log.info("measured the link to %s: %s, %.1f ms", name, format_rate(8 * rate), 1e3 * latency_s)
        return rate, latency_s

    def _measure_sending(self, peer: int) -> tuple[float, float]:
        short, long = torch.zeros(_SHORT, dtype=torch.uint8), torch.zeros(self._bytes, dtype=torch.uint8)
        trips = []
        for message in (short, short, long, long):  # the first of each kind gets the connection ready
            start = time.perf_counter()
            self._manager.group.send_async(message, peer).wait()
            self._manager.group.receive_async(torch.empty_like(short), peer).wait()
            trips.append(time.perf_counter() - start)
        round_trip_s, long_s = trips[1], trips[3]
        # A long message is offered, and sent once the receiver has answered.
        sending_s = max(long_s - 2 * round_trip_s, long_s / 4)
        return self._bytes / sending_s, round_trip_s / 2

    def _answer(self, peer: int) -> None:
        short = torch.zeros(_SHORT, dtype=torch.uint8)
        for size in (_SHORT, _SHORT, self._bytes, self._bytes):
            self._manager.group.receive_async(torch.empty(size, dtype=torch.uint8), peer).wait()
            self._manager.group.send_async(short, peer).wait()


def known_links(graph: TopologyGraph, nodes: Sequence[str], rank: int) -> tuple[list[float], list[float]]:
    """Return rates and latencies from a rank to each one, as far as the agents have measured them."""
    rates, latencies = [0.0] * len(nodes), [0.0] * len(nodes)
    for place, node in enumerate(nodes):
        if node == nodes[rank]:
            rates[place] = _LOCAL_RATE
            continue
        link = graph.link(nodes[rank], node)
        if link is not None:
            rates[place], latencies[place] = (link.mbps or 0.0) * _BYTES_PER_MBIT, link.rtt_s / 2
    return rates, latencies


def possible_report(reported: MemberSpeed) -> MemberSpeed:
    """Return a report whose impossible figures are replaced by the nearest possible ones."""
    return msgspec.structs.replace(
        reported,
        **possible_speed(reported.block)._asdict(),
        rates=tuple(map(possible_rate, reported.rates)),
        latencies=tuple(map(possible_latency, reported.latencies)),
        host_rate=possible_rate(reported.host_rate),
    )


def unknown_pairs(members: Sequence[MemberSpeed]) -> list[Pair]:
    """Return the pairs of ranks whose link neither of them knows."""
    count = len(members)
    return [
        (a, b)
        for a in range(count)
        for b in range(a + 1, count)
        if not members[a].rates[b] and not members[b].rates[a]
    ]


def rounds_of(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs in rounds, in each of which no rank is twice."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        free = (each for each in rounds if not any(set(pair) & set(other) for other in each))
        chosen = next(free, None)
        if chosen is None:
            rounds.append([pair])
        else:
            chosen.append(pair)
    return rounds


def combine_links(members: Sequence[MemberSpeed]) -> LinkRates:
    """Return the links of a group; the other end's figure stands for one that is not known.

    Both ends measure the latency. The smaller figure counts, so that no member alone makes a link slow.
    """
    count = range(len(members))

    def latency(a: int, b: int) -> float:
        both = (members[a].latencies[b], members[b].latencies[a])
        return min(filter(None, both), default=0.0)

    return LinkRates(
        tuple(tuple(members[a].rates[b] or members[b].rates[a] for b in count) for a in count),
        tuple(tuple(latency(a, b) for b in count) for a in count),
    )


def host_of(device: torch.device) -> tuple[int, float]:
    """Return the memory of the computer beside that of an accelerator, and the bytes per second from there.

    Both are 0 where the device uses the computer's memory.
    """
    if device.type not in ("cuda", "xpu"):
        return 0, 0.0
    try:
        source = torch.zeros(_MOST * 16, dtype=torch.uint8).pin_memory()
        target = torch.empty_like(source, device=device)
        seconds = 0.0
        for _ in range(2):
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            target.copy_(source)
            torch.accelerator.synchronize(device)
            seconds = time.perf_counter() - start
    except (RuntimeError, NotImplementedError):  # no pinned memory, or too little of it
        return 0, 0.0
    return free_memory(torch.device("cpu")), source.nbytes / seconds
