"""A sum over members by a codec whose sums can be encoded again.

Each member owns a shard of the tensor. All send it their share of that shard, encoded; it adds them in
float32 in rank order, its own share uncoded, encodes the sum once and sends it to all. So everybody decodes
the same bytes, and a number is rounded twice, however many members there are.

What both roundings lost stays with who rounded: of the shares with each sender, of the sum with the shard's
owner, which adds it to its own share of the same numbers next time. So one residual as large as the tensor
holds both, and it stays right when members come and go and the shards are cut anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from barnraise.compression.allreduce.exchange import (
    IncomingPayload,
    PayloadCheck,
    PayloadExchange,
    PayloadKind,
    PayloadMessage,
)
from barnraise.compression.codecs.codec import Codec, CodecRound, is_finite
from barnraise.core.errors import CollectiveError, ProtocolError

PIECE = 1 << 21  # numbers: while one piece is on its way, others are encoded and summed


def sum_in_shards(
    exchange: PayloadExchange, codec: Codec, turn: CodecRound, values: torch.Tensor, keeps: bool
) -> tuple[torch.Tensor, list[PayloadCheck]]:
    """The sum and what is to be said about it; with ``keeps``, ``values`` become their own residual."""
    total = torch.zeros_like(values)
    pieces = [_Piece(exchange, one) for one in stretches(codec, turn, values, total, keeps)]
    for piece in pieces:
        piece.send_shares()
    for piece in pieces:
        piece.send_sum()
    return total, [verdict for piece in pieces for verdict in piece.finish()]


class Stretch(NamedTuple):
    """A part of a tensor, from its number ``first`` on, that is encoded and sent as one."""

    codec: Codec
    turn: CodecRound
    first: int
    values: torch.Tensor
    total: torch.Tensor
    keeps: bool

    def turn_at(self, span: slice) -> CodecRound:
        return CodecRound(f"{self.turn.name}@{self.first + span.start}", self.turn.step)


def stretches(
    codec: Codec, turn: CodecRound, values: torch.Tensor, total: torch.Tensor, keeps: bool
) -> list[Stretch]:
    """A payload whose size is not known beforehand is made of the whole at once."""
    size = PIECE if codec.is_fixed else max(1, values.numel())
    return [
        Stretch(codec, turn, first, values[first : first + size], total[first : first + size], keeps)
        for first in range(0, values.numel(), size)
    ]


def cut(numel: int, world: int, grain: int) -> list[slice]:
    """One shard for each member, the last ones shorter or empty."""
    size = grain * -(-numel // (grain * world))
    return [slice(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(world)]


class _Piece:
    """A stretch of the tensor: to the owners of its shards, and back from them."""

    def __init__(self, exchange: PayloadExchange, stretch: Stretch) -> None:
        self._exchange, self._codec, self._keeps = exchange, stretch.codec, stretch.keeps
        self._values, self._total = stretch.values, stretch.total
        self._shards = cut(stretch.values.numel(), exchange.world, stretch.codec.grain)
        self._turns = [stretch.turn_at(shard) for shard in self._shards]
        self._own = self._shards[exchange.rank]
        self._verdict = PayloadCheck(PayloadKind.FINE, exchange.rank)
        self._arriving: IncomingPayload | None = None

    def send_shares(self) -> None:
        me, fine = self._exchange.rank, self._verdict
        payloads: list[torch.Tensor | None] = [None] * self._exchange.world
        try:
            for rank, (shard, turn) in enumerate(zip(self._shards, self._turns, strict=True)):
                if rank != me:
                    payloads[rank] = self._encode(self._values[shard], turn)
        except CollectiveError:
            self._verdict = PayloadCheck(PayloadKind.NOT_FINITE, me)
        if not is_finite(self._values[self._own]):
            self._verdict = PayloadCheck(PayloadKind.NOT_FINITE, me)
        if self._verdict != fine:
            payloads = [
                None if rank == me else self._nothing(shard) for rank, shard in enumerate(self._shards)
            ]
        messages = [[] if one is None else [PayloadMessage(self._verdict, one)] for one in payloads]
        sizes = self._sizes_for_me([0 if one is None else one.numel() for one in payloads])
        expected = [[] if rank == me else [size] for rank, size in enumerate(sizes)]
        self._arriving = self._exchange.spread(messages, expected, self._values.device)

    def send_sum(self) -> None:
        assert self._arriving is not None
        me = self._exchange.rank
        shares = self._arriving.wait()
        total = torch.zeros_like(self._values[self._own])
        verdict = self._verdict
        for rank in range(self._exchange.world):
            if rank == me:
                total.add_(self._values[self._own])
            else:
                found = self._added(total, shares[rank][0], rank)
                verdict = found if verdict.kind is PayloadKind.FINE else verdict
        payload = self._nothing(self._own)
        if verdict.kind is PayloadKind.FINE:
            try:
                payload = self._encode(total, self._turns[me])
            except CollectiveError:
                verdict = PayloadCheck(PayloadKind.TOO_LARGE, me)
        if self._keeps:
            self._values[self._own] = total
        sizes = self._sizes_of_sums(payload.numel())
        self._arriving = self._exchange.gather(PayloadMessage(verdict, payload), sizes)

    def finish(self) -> list[PayloadCheck]:
        assert self._arriving is not None
        sums = [message for (message,) in self._arriving.wait()]
        for shard, turn, (verdict, payload) in zip(self._shards, self._turns, sums, strict=True):
            if verdict.kind is PayloadKind.FINE:
                self._codec.add(self._total[shard], payload, turn)
        return [one.verdict for one in sums]

    def _encode(self, values: torch.Tensor, turn: CodecRound) -> torch.Tensor:
        payload = self._codec.encode(values, turn)
        if self._keeps:
            self._codec.add(values, payload, turn, sign=-1.0)
        return payload

    def _added(self, total: torch.Tensor, share: PayloadMessage, rank: int) -> PayloadCheck:
        """Of a share: only its sender's own word counts, and only about itself."""
        if share.verdict.kind is not PayloadKind.FINE:
            return PayloadCheck(share.verdict.kind, rank)
        try:
            self._codec.add(total, share.payload, self._turns[self._exchange.rank])
        except ProtocolError:
            return PayloadCheck(PayloadKind.MALFORMED, rank)
        return PayloadCheck(PayloadKind.FINE, rank)

    def _nothing(self, shard: slice) -> torch.Tensor:
        """In place of a payload that could not be made; as long as one, where the receiver counts on that."""
        size = self._codec.payload_bytes(shard.stop - shard.start) if self._codec.is_fixed else 0
        return torch.zeros(size, dtype=torch.uint8, device=self._values.device)

    def _most(self, shard: slice) -> int:
        return self._codec.payload_bytes(shard.stop - shard.start)

    def _sizes_for_me(self, leaving: Sequence[int]) -> list[int]:
        me, world = self._exchange.rank, self._exchange.world
        if self._codec.is_fixed:
            return [self._most(self._own)] * world
        table = self._exchange.share(leaving, self._values.device)
        for row in table:
            self._require([(size, self._most(shard)) for size, shard in zip(row, self._shards, strict=True)])
        return [row[me] for row in table]

    def _sizes_of_sums(self, own: int) -> list[int]:
        most = [self._most(shard) for shard in self._shards]
        if self._codec.is_fixed:
            return most
        sizes = [row[0] for row in self._exchange.share([own], self._values.device)]
        self._require(list(zip(sizes, most, strict=True)))
        return sizes

    def _require(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Everybody sees all sizes, so everybody refuses the same ones."""
        for size, most in sizes:
            if not 0 <= size <= most:
                raise ProtocolError(f"a member announced {size} bytes, where {self._codec.name} has {most}")
