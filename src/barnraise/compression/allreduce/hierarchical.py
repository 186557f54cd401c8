"""A sum over members at several sites: exact inside each of them, encoded between them.

A tensor is cut in lanes, as many as the largest site has members, and each site has one member that leads a
lane; only the leaders of one lane speak with each other across sites.

1. Inside: everybody hands its numbers of a lane to the lane's leader at its own site, in float32. The leader
   adds them in the order of ranks.
2. Across: a lane has one shard for each site. Leaders send their site's sum of a shard, encoded, to the
   leader at the shard's site, which adds them in the order of sites, its own uncoded.
3. Across: it encodes that sum once and sends it to the other leaders. A sparse codec's sums are not encoded
   again: leaders skip the second, and send their site's sum of the whole lane.
4. Inside: leaders give all that to the members of their site as it came, so everybody decodes the same bytes.

What crosses between sites is as much as if each were one machine, and all members share the work.

What roundings lost stays with the leader that rounded, in its own residual; the others keep nothing of the
lane, for their residuals went to it with their numbers. So nothing has to be moved when other members lead:
what one kept as a leader reaches the next one, in float32, with its own share of those numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from barnraise.compression.allreduce import sharded
from barnraise.compression.allreduce.exchange import (
    IncomingPayload,
    PayloadCheck,
    PayloadExchange,
    PayloadKind,
    PayloadMessage,
)
from barnraise.compression.codecs.codec import Codec, CodecRound, is_finite
from barnraise.compression.codecs.fp32 import Fp32
from barnraise.core.errors import ProtocolError

_PLAIN = Fp32()
_AHEAD = 2  # pieces that are one stage further: while one is on its way, others are summed and encoded


class SiteLane(NamedTuple):
    """A stretch of the tensor, its shards by site, and who leads it at each site."""

    whole: slice
    shards: tuple[slice, ...]
    leaders: tuple[int, ...]


def lanes_of(numel: int, sites: Sequence[Sequence[int]], grain: int) -> list[SiteLane]:
    """The last ones shorter or empty. Every member leads at least one."""
    found = []
    for number, whole in enumerate(sharded.cut(numel, max(map(len, sites)), grain)):
        pieces = sharded.cut(whole.stop - whole.start, len(sites), grain)
        moved = tuple(slice(whole.start + one.start, whole.start + one.stop) for one in pieces)
        found.append(SiteLane(whole, moved, tuple(site[number % len(site)] for site in sites)))
    return found


def sum_through_sites(
    exchange: PayloadExchange, codec: Codec, turn: CodecRound, values: torch.Tensor, keeps: bool
) -> tuple[torch.Tensor, list[PayloadCheck]]:
    """The sum and what is to be said about it; with ``keeps``, ``values`` become their own residual."""
    total = torch.zeros_like(values)
    pieces = [_Piece(exchange, one) for one in sharded.stretches(codec, turn, values, total, keeps)]
    stages = (_Piece.hand_in, _Piece.send_shares, _Piece.send_sums, _Piece.pass_on, _Piece.finish)
    for tick in range(len(pieces) + _AHEAD * (len(stages) - 1)):
        for number, stage in enumerate(stages):
            if 0 <= (place := tick - _AHEAD * number) < len(pieces):
                stage(pieces[place])
    verdicts = [verdict for piece in pieces for verdict in piece.verdicts]
    if codec.is_sparse and not is_finite(total):  # all have added the same
        verdicts.append(PayloadCheck(PayloadKind.TOO_LARGE, exchange.rank))
    return total, verdicts


class _Piece:
    """A stretch of the tensor that goes through all stages as one."""

    def __init__(self, exchange: PayloadExchange, stretch: sharded.Stretch) -> None:
        codec, values = stretch.codec, stretch.values
        self._exchange, self._codec, self._keeps = exchange, codec, stretch.keeps
        self._turn, self._turn_at = stretch.turn, stretch.turn_at
        self._values, self._total = values, stretch.total
        self._summed = (
            values if self._keeps else torch.empty_like(values)
        )  # over this site, where this one leads
        self._site, self._sites = exchange.site, exchange.sites
        self._mates = [rank for rank in self._sites[self._site] if rank != exchange.rank]
        self._lanes = lanes_of(values.numel(), self._sites, codec.grain)
        leaders = [lane.leaders[self._site] for lane in self._lanes]
        self._led = [number for number, leader in enumerate(leaders) if leader == exchange.rank]
        self._found: dict[int, PayloadCheck] = {}  # about the lanes that this one leads
        self._parcels: dict[tuple[int, int], PayloadMessage] = {}  # by lane and site: what everybody adds
        self._parcel_sizes: dict[tuple[int, int], int] = {}
        self._arriving: IncomingPayload | None = None
        self.verdicts: list[PayloadCheck] = []

    def hand_in(self) -> None:
        me, is_fine = self._exchange.rank, is_finite(self._values)
        verdict = PayloadCheck(PayloadKind.FINE if is_fine else PayloadKind.NOT_FINITE, me)
        self._found = dict.fromkeys(self._led, verdict)
        messages, expected = self._outgoing(), self._incoming()
        for lane in self._lanes:
            leader = lane.leaders[self._site]
            size = _PLAIN.payload_bytes(lane.whole.stop - lane.whole.start)
            if leader == me:
                for mate in self._mates:
                    expected[mate].append(size)
            else:
                mine = self._values[lane.whole]
                payload = _PLAIN.encode(mine, self._turn) if is_fine else self._blank(size)
                messages[leader].append(PayloadMessage(verdict, payload))
        self._send(messages, expected)

    def send_shares(self) -> None:
        came = self._came()
        for number in self._led:
            self._sum_site(number, came)
        for number, lane in enumerate(self._lanes) if self._keeps else ():
            if number not in self._led:
                self._values[lane.whole] = 0.0  # its leader has it now
        if self._codec.is_sparse:
            return
        shares: dict[tuple[int, int], PayloadMessage] = {}
        for number in self._led:
            for other in self._others():
                shard = self._lanes[number].shards[other]
                shares[number, other] = self._encoded(number, self._summed[shard], shard)
        sizes = self._share_sizes(shares)
        messages, expected = self._outgoing(), self._incoming()
        for number in self._led:
            for other in self._others():
                leader = self._lanes[number].leaders[other]
                messages[leader].append(shares[number, other])
                expected[leader].append(sizes[number, other, self._site])
        self._send(messages, expected)

    def send_sums(self) -> None:
        came = self._came() if not self._codec.is_sparse else []
        for number in self._led:
            self._parcels[number, self._site] = self._parcel(number, came)
        self._parcel_sizes = self._sizes_of_parcels()
        messages, expected = self._outgoing(), self._incoming()
        for number in self._led:
            for other in self._others():
                leader = self._lanes[number].leaders[other]
                messages[leader].append(self._parcels[number, self._site])
                expected[leader].append(self._parcel_sizes[number, other])
        self._send(messages, expected)

    def pass_on(self) -> None:
        came = self._came()
        messages, expected = self._outgoing(), self._incoming()
        for number, lane in enumerate(self._lanes):
            leader = lane.leaders[self._site]
            for site, sender in enumerate(lane.leaders):
                if leader != self._exchange.rank:
                    expected[leader].append(self._parcel_sizes[number, site])
                    continue
                if site != self._site:
                    self._parcels[number, site] = next(came[sender])
                for mate in self._mates:
                    messages[mate].append(self._parcels[number, site])
        self._send(messages, expected)

    def finish(self) -> None:
        came = self._came()
        for number, lane in enumerate(self._lanes):
            for site in range(len(self._sites)):
                if number not in self._led:
                    self._parcels[number, site] = next(came[lane.leaders[self._site]])
                verdict, payload = self._parcels.pop((number, site))
                self.verdicts.append(verdict)
                if verdict.kind is PayloadKind.FINE:
                    span = self._span(number, site)
                    self._codec.add(self._total[span], payload, self._turn_at(span))

    # a leader's part

    def _sum_site(self, number: int, came: Sequence[Iterator[PayloadMessage]]) -> None:
        """This site's sum of a lane, and whether it is one."""
        me, whole = self._exchange.rank, self._lanes[number].whole
        total = torch.zeros_like(self._values[whole])
        for rank in sorted((*self._mates, me)):
            if rank == me:
                total.add_(self._values[whole])
            else:
                self._add(_PLAIN, number, total, next(came[rank]), rank, (rank,), self._turn)
        self._summed[whole] = total
        if self._found[number].kind is PayloadKind.FINE and not is_finite(total):
            self._found[number] = PayloadCheck(PayloadKind.TOO_LARGE, me)

    def _parcel(self, number: int, came: Sequence[Iterator[PayloadMessage]]) -> PayloadMessage:
        """What everybody is to add for this site: the sum of its shard, or of a sparse codec its own sum."""
        lane, span = self._lanes[number], self._span(number, self._site)
        if self._codec.is_sparse:
            return self._encoded(number, self._summed[span], span)
        total = torch.zeros_like(self._summed[span])
        for site, members in enumerate(self._sites):
            if site == self._site:
                total.add_(self._summed[span])
            else:
                sender = lane.leaders[site]
                turn = self._turn_at(span)
                self._add(self._codec, number, total, next(came[sender]), sender, members, turn)
        if self._found[number].kind is PayloadKind.FINE and not is_finite(total):
            self._found[number] = PayloadCheck(PayloadKind.TOO_LARGE, self._exchange.rank)
        message = self._encoded(number, total, span)
        if self._keeps:
            self._summed[span] = total
        return message

    def _add(
        self,
        codec: Codec,
        number: int,
        total: torch.Tensor,
        message: PayloadMessage,
        sender: int,
        about: Sequence[int],
        turn: CodecRound,
    ) -> None:
        """A sender's word counts about itself, and of a leader about its site."""
        found = message.verdict
        if found.kind is PayloadKind.FINE:
            try:
                codec.add(total, message.payload, turn)
            except ProtocolError:
                found = PayloadCheck(PayloadKind.MALFORMED, sender)
        if found.kind is not PayloadKind.FINE and self._found[number].kind is PayloadKind.FINE:
            self._found[number] = found if found.rank in about else PayloadCheck(found.kind, sender)

    def _encoded(self, number: int, values: torch.Tensor, span: slice) -> PayloadMessage:
        """With what was found about the lane; of ``values`` the residual is left, if it is kept."""
        verdict, turn = self._found[number], self._turn_at(span)
        if verdict.kind is not PayloadKind.FINE:
            return PayloadMessage(verdict, self._blank(self._most(span) if self._codec.is_fixed else 0))
        payload = self._codec.encode(values, turn)
        if self._keeps:
            self._codec.add(values, payload, turn, sign=-1.0)
        return PayloadMessage(verdict, payload)

    # sizes

    def _share_sizes(self, shares: dict[tuple[int, int], PayloadMessage]) -> dict[tuple[int, int, int], int]:
        """By lane, site of the sender, site of the receiver."""
        count = len(self._sites)
        own = [0] * (len(self._lanes) * count)
        for (number, site), message in shares.items():
            own[number * count + site] = message.payload.numel()
        heard = self._heard(own)
        return {
            (number, source, target): self._size(heard, leader, number * count + target, shard)
            for number, lane in enumerate(self._lanes)
            for source, leader in enumerate(lane.leaders)
            for target, shard in enumerate(lane.shards)
            if source != target
        }

    def _sizes_of_parcels(self) -> dict[tuple[int, int], int]:
        own = [0] * len(self._lanes)
        for number in self._led:
            own[number] = self._parcels[number, self._site].payload.numel()
        heard = self._heard(own)
        return {
            (number, site): self._size(heard, leader, number, self._span(number, site))
            for number, lane in enumerate(self._lanes)
            for site, leader in enumerate(lane.leaders)
        }

    def _heard(self, own: Sequence[int]) -> list[list[int]]:
        return [] if self._codec.is_fixed else self._exchange.share(own, self._values.device)

    def _size(self, heard: Sequence[Sequence[int]], rank: int, place: int, span: slice) -> int:
        """Everybody sees all sizes, so everybody refuses the same ones."""
        most = self._most(span)
        size = heard[rank][place] if heard else most
        if not 0 <= size <= most:
            raise ProtocolError(f"a member announced {size} bytes, where {self._codec.name} has {most}")
        return size

    def _most(self, span: slice) -> int:
        return self._codec.payload_bytes(span.stop - span.start)

    def _blank(self, size: int) -> torch.Tensor:
        """In place of a payload that could not be made."""
        return torch.zeros(size, dtype=torch.uint8, device=self._values.device)

    # ways

    def _others(self) -> list[int]:
        return [site for site in range(len(self._sites)) if site != self._site]

    def _span(self, number: int, site: int) -> slice:
        lane = self._lanes[number]
        return lane.whole if self._codec.is_sparse else lane.shards[site]

    def _outgoing(self) -> list[list[PayloadMessage]]:
        return [[] for _ in range(self._exchange.world)]

    def _incoming(self) -> list[list[int]]:
        return [[] for _ in range(self._exchange.world)]

    def _send(self, messages: Sequence[Sequence[PayloadMessage]], expected: Sequence[Sequence[int]]) -> None:
        self._arriving = self._exchange.spread(messages, expected, self._values.device)

    def _came(self) -> list[Iterator[PayloadMessage]]:
        """By sender; lanes, and of a lane sites, are in order."""
        assert self._arriving is not None
        arrived, self._arriving = self._arriving.wait(), None
        return [iter(messages) for messages in arrived]
