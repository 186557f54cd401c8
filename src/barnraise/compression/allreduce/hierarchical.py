"""Hierarchical all-reduce over several sites: exact inside each site, encoded between them.

A tensor is cut into channels, as many as the largest site has members. Each site has one leader per
channel. Only the leaders of one channel communicate across sites.

1. Inside: every member sends its numbers of a channel to the channel's leader at its site, in float32. The
   leader adds them in rank order.
2. Across: a channel has one shard for each site. Leaders send their site's sum of a shard, encoded, to the
   leader at the shard's site. That leader adds them in site order, its own unencoded.
3. Across: it encodes the sum once and sends it to the other leaders. Sums of a sparse codec are not encoded
   again: leaders skip step 2 and send their site's sum of the whole channel.
4. Inside: leaders forward these payloads unchanged to their site, so all members decode the same bytes.

The traffic between sites is the same as if each site were one machine, and all members share the work.

The rounding error stays in the residual of the leader that rounded. The other members clear theirs for the
channel, because they sent their residuals with their numbers. So nothing moves when the leaders change: a
former leader's residual reaches the next leader in float32 with its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from barnraise.compression.allreduce import sharded
from barnraise.compression.allreduce.exchange import (
    IncomingPayloads,
    PayloadCheck,
    PayloadExchange,
    PayloadKind,
    PayloadMessage,
)
from barnraise.compression.codecs.codec import Codec, CodecRound, is_finite
from barnraise.compression.codecs.fp32 import Fp32
from barnraise.core.errors import ProtocolError

_PLAIN = Fp32()
_AHEAD = 2  # chunks between two stages: while one is sent, others are summed and encoded


class SiteChannel(NamedTuple):
    """A span of the tensor, its shards by site, and its leader at each site."""

    whole: slice
    shards: tuple[slice, ...]
    leaders: tuple[int, ...]


def channels_of(numel: int, sites: Sequence[Sequence[int]], grain: int) -> list[SiteChannel]:
    """Cut the tensor into channels. The last ones may be shorter or empty; every member leads one or more."""
    channels = []
    for number, whole in enumerate(sharded.cut(numel, max(map(len, sites)), grain)):
        shards = sharded.cut(whole.stop - whole.start, len(sites), grain)
        moved = tuple(slice(whole.start + shard.start, whole.start + shard.stop) for shard in shards)
        channels.append(SiteChannel(whole, moved, tuple(site[number % len(site)] for site in sites)))
    return channels


def all_reduce_hierarchical(
    exchange: PayloadExchange,
    codec: Codec,
    codec_round: CodecRound,
    values: torch.Tensor,
    keep_residual: bool,
) -> tuple[torch.Tensor, list[PayloadCheck]]:
    """Return the sum and its checks. With ``keep_residual``, ``values`` become their own residual."""
    total = torch.zeros_like(values)
    reductions = [
        _ChunkReduction(exchange, chunk)
        for chunk in sharded.cut_chunks(codec, codec_round, values, total, keep_residual)
    ]
    stages = (
        _ChunkReduction.send_to_leaders,
        _ChunkReduction.send_shares,
        _ChunkReduction.send_sums,
        _ChunkReduction.send_to_site,
        _ChunkReduction.finish,
    )
    for tick in range(len(reductions) + _AHEAD * (len(stages) - 1)):
        for number, stage in enumerate(stages):
            if 0 <= (place := tick - _AHEAD * number) < len(reductions):
                stage(reductions[place])
    verdicts = [verdict for reduction in reductions for verdict in reduction.verdicts]
    if codec.is_sparse and not is_finite(total):  # all members added the same payloads
        verdicts.append(PayloadCheck(PayloadKind.TOO_LARGE, exchange.rank))
    return total, verdicts


class _ChunkReduction:
    """All-reduce of one chunk, through all stages."""

    def __init__(self, exchange: PayloadExchange, chunk: sharded.TensorChunk) -> None:
        codec, values = chunk.codec, chunk.values
        self._exchange, self._codec, self._keep_residual = exchange, codec, chunk.keep_residual
        self._codec_round, self._round_at = chunk.codec_round, chunk.round_at
        self._values, self._total = values, chunk.total
        self._summed = (
            values if self._keep_residual else torch.empty_like(values)
        )  # over this site, for led channels
        self._site, self._sites = exchange.site, exchange.sites
        self._site_peers = [rank for rank in self._sites[self._site] if rank != exchange.rank]
        self._channels = channels_of(values.numel(), self._sites, codec.grain)
        leaders = [channel.leaders[self._site] for channel in self._channels]
        self._led_channels = [number for number, leader in enumerate(leaders) if leader == exchange.rank]
        self._checks: dict[int, PayloadCheck] = {}  # by led channel
        self._site_sums: dict[
            tuple[int, int], PayloadMessage
        ] = {}  # by channel and site: messages that all members add
        self._site_sum_sizes: dict[tuple[int, int], int] = {}
        self._arriving: IncomingPayloads | None = None
        self.verdicts: list[PayloadCheck] = []

    def send_to_leaders(self) -> None:
        own_rank, is_fine = self._exchange.rank, is_finite(self._values)
        verdict = PayloadCheck(PayloadKind.FINE if is_fine else PayloadKind.NOT_FINITE, own_rank)
        self._checks = dict.fromkeys(self._led_channels, verdict)
        messages, expected = self._outgoing(), self._incoming()
        for channel in self._channels:
            leader = channel.leaders[self._site]
            size = _PLAIN.payload_bytes(channel.whole.stop - channel.whole.start)
            if leader == own_rank:
                for site_peer in self._site_peers:
                    expected[site_peer].append(size)
            else:
                own_values = self._values[channel.whole]
                payload = _PLAIN.encode(own_values, self._codec_round) if is_fine else self._blank(size)
                messages[leader].append(PayloadMessage(verdict, payload))
        self._send(messages, expected)

    def send_shares(self) -> None:
        received = self._received()
        for number in self._led_channels:
            self._sum_site(number, received)
        for number, channel in enumerate(self._channels) if self._keep_residual else ():
            if number not in self._led_channels:
                self._values[channel.whole] = 0.0  # its leader has it
        if self._codec.is_sparse:
            return
        shares: dict[tuple[int, int], PayloadMessage] = {}
        for number in self._led_channels:
            for other in self._others():
                shard = self._channels[number].shards[other]
                shares[number, other] = self._encoded(number, self._summed[shard], shard)
        sizes = self._share_sizes(shares)
        messages, expected = self._outgoing(), self._incoming()
        for number in self._led_channels:
            for other in self._others():
                leader = self._channels[number].leaders[other]
                messages[leader].append(shares[number, other])
                expected[leader].append(sizes[number, other, self._site])
        self._send(messages, expected)

    def send_sums(self) -> None:
        received = self._received() if not self._codec.is_sparse else []
        for number in self._led_channels:
            self._site_sums[number, self._site] = self._site_sum(number, received)
        self._site_sum_sizes = self._exchange_site_sum_sizes()
        messages, expected = self._outgoing(), self._incoming()
        for number in self._led_channels:
            for other in self._others():
                leader = self._channels[number].leaders[other]
                messages[leader].append(self._site_sums[number, self._site])
                expected[leader].append(self._site_sum_sizes[number, other])
        self._send(messages, expected)

    def send_to_site(self) -> None:
        received = self._received()
        messages, expected = self._outgoing(), self._incoming()
        for number, channel in enumerate(self._channels):
            leader = channel.leaders[self._site]
            for site, sender in enumerate(channel.leaders):
                if leader != self._exchange.rank:
                    expected[leader].append(self._site_sum_sizes[number, site])
                    continue
                if site != self._site:
                    self._site_sums[number, site] = next(received[sender])
                for site_peer in self._site_peers:
                    messages[site_peer].append(self._site_sums[number, site])
        self._send(messages, expected)

    def finish(self) -> None:
        received = self._received()
        for number, channel in enumerate(self._channels):
            for site in range(len(self._sites)):
                if number not in self._led_channels:
                    self._site_sums[number, site] = next(received[channel.leaders[self._site]])
                verdict, payload = self._site_sums.pop((number, site))
                self.verdicts.append(verdict)
                if verdict.kind is PayloadKind.FINE:
                    span = self._span(number, site)
                    self._codec.add(self._total[span], payload, self._round_at(span))

    # leaders only

    def _sum_site(self, number: int, received: Sequence[Iterator[PayloadMessage]]) -> None:
        """Compute this site's sum of a channel, and check it."""
        own_rank, whole = self._exchange.rank, self._channels[number].whole
        total = torch.zeros_like(self._values[whole])
        for rank in sorted((*self._site_peers, own_rank)):
            if rank == own_rank:
                total.add_(self._values[whole])
            else:
                self._add(_PLAIN, number, total, next(received[rank]), rank, (rank,), self._codec_round)
        self._summed[whole] = total
        if self._checks[number].kind is PayloadKind.FINE and not is_finite(total):
            self._checks[number] = PayloadCheck(PayloadKind.TOO_LARGE, own_rank)

    def _site_sum(self, number: int, received: Sequence[Iterator[PayloadMessage]]) -> PayloadMessage:
        """Return this site's message: the sum of its shard, or its own sum if the codec is sparse."""
        channel, span = self._channels[number], self._span(number, self._site)
        if self._codec.is_sparse:
            return self._encoded(number, self._summed[span], span)
        total = torch.zeros_like(self._summed[span])
        for site, members in enumerate(self._sites):
            if site == self._site:
                total.add_(self._summed[span])
            else:
                sender = channel.leaders[site]
                codec_round = self._round_at(span)
                self._add(self._codec, number, total, next(received[sender]), sender, members, codec_round)
        if self._checks[number].kind is PayloadKind.FINE and not is_finite(total):
            self._checks[number] = PayloadCheck(PayloadKind.TOO_LARGE, self._exchange.rank)
        message = self._encoded(number, total, span)
        if self._keep_residual:
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
        codec_round: CodecRound,
    ) -> None:
        """Add a message to the total.

        A sender reports only on itself, and a leader on its site.
        """
        check = message.verdict
        if check.kind is PayloadKind.FINE:
            try:
                codec.add(total, message.payload, codec_round)
            except ProtocolError:
                check = PayloadCheck(PayloadKind.MALFORMED, sender)
        if check.kind is not PayloadKind.FINE and self._checks[number].kind is PayloadKind.FINE:
            self._checks[number] = check if check.rank in about else PayloadCheck(check.kind, sender)

    def _encoded(self, number: int, values: torch.Tensor, span: slice) -> PayloadMessage:
        """Encode values with the channel's check. If residuals are kept, ``values`` become the residual."""
        verdict, codec_round = self._checks[number], self._round_at(span)
        if verdict.kind is not PayloadKind.FINE:
            return PayloadMessage(verdict, self._blank(self._max_bytes(span) if self._codec.is_fixed else 0))
        payload = self._codec.encode(values, codec_round)
        if self._keep_residual:
            self._codec.add(values, payload, codec_round, sign=-1.0)
        return PayloadMessage(verdict, payload)

    # sizes

    def _share_sizes(self, shares: dict[tuple[int, int], PayloadMessage]) -> dict[tuple[int, int, int], int]:
        """Return the sizes by channel, site of the sender and site of the receiver."""
        count = len(self._sites)
        own = [0] * (len(self._channels) * count)
        for (number, site), message in shares.items():
            own[number * count + site] = message.payload.numel()
        announced = self._announced_sizes(own)
        return {
            (number, source, target): self._size(announced, leader, number * count + target, shard)
            for number, channel in enumerate(self._channels)
            for source, leader in enumerate(channel.leaders)
            for target, shard in enumerate(channel.shards)
            if source != target
        }

    def _exchange_site_sum_sizes(self) -> dict[tuple[int, int], int]:
        own = [0] * len(self._channels)
        for number in self._led_channels:
            own[number] = self._site_sums[number, self._site].payload.numel()
        announced = self._announced_sizes(own)
        return {
            (number, site): self._size(announced, leader, number, self._span(number, site))
            for number, channel in enumerate(self._channels)
            for site, leader in enumerate(channel.leaders)
        }

    def _announced_sizes(self, own: Sequence[int]) -> list[list[int]]:
        return [] if self._codec.is_fixed else self._exchange.all_gather_numbers(own, self._values.device)

    def _size(self, announced: Sequence[Sequence[int]], rank: int, place: int, span: slice) -> int:
        """Return a valid size. All members see all sizes, so all reject the same ones."""
        max_bytes = self._max_bytes(span)
        size = announced[rank][place] if announced else max_bytes
        if not 0 <= size <= max_bytes:
            raise ProtocolError(f"a worker announced {size} bytes, but {self._codec.name} allows {max_bytes}")
        return size

    def _max_bytes(self, span: slice) -> int:
        return self._codec.payload_bytes(span.stop - span.start)

    def _blank(self, size: int) -> torch.Tensor:
        """Return a placeholder for a payload that could not be encoded."""
        return torch.zeros(size, dtype=torch.uint8, device=self._values.device)

    # messages

    def _others(self) -> list[int]:
        return [site for site in range(len(self._sites)) if site != self._site]

    def _span(self, number: int, site: int) -> slice:
        channel = self._channels[number]
        return channel.whole if self._codec.is_sparse else channel.shards[site]

    def _outgoing(self) -> list[list[PayloadMessage]]:
        return [[] for _ in range(self._exchange.world)]

    def _incoming(self) -> list[list[int]]:
        return [[] for _ in range(self._exchange.world)]

    def _send(self, messages: Sequence[Sequence[PayloadMessage]], expected: Sequence[Sequence[int]]) -> None:
        self._arriving = self._exchange.all_to_all(messages, expected, self._values.device)

    def _received(self) -> list[Iterator[PayloadMessage]]:
        """Wait for the messages. Return them by sender, in the order of channels and sites."""
        assert self._arriving is not None
        arrived, self._arriving = self._arriving.wait(), None
        return [iter(messages) for messages in arrived]
