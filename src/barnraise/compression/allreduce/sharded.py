"""Sharded all-reduce for a codec whose sums can be encoded again.

Each member owns a shard of the tensor. All members send their encoded share of a shard to its owner. The
owner adds them in float32 in rank order, its own share unencoded. It encodes the sum once and sends it to
all. So all members decode the same bytes, and every number is rounded exactly twice.

Each rounding error stays with the member that rounded: errors of shares with the senders, errors of the sum
with the shard's owner. The owner adds it to its own share of the same numbers in the next round. One
residual of the tensor's size holds both. It stays valid when members join or leave and the shards change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from barnraise.compression.allreduce.exchange import (
    IncomingPayloads,
    PayloadCheck,
    PayloadExchange,
    PayloadKind,
    PayloadMessage,
)
from barnraise.compression.codecs.codec import Codec, CodecRound, is_finite
from barnraise.core.errors import CollectiveError, ProtocolError

CHUNK_NUMBERS = 1 << 21  # while one chunk is sent, others are encoded and summed


def all_reduce_sharded(
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
        for chunk in cut_chunks(codec, codec_round, values, total, keep_residual)
    ]
    for reduction in reductions:
        reduction.send_shares()
    for reduction in reductions:
        reduction.send_sum()
    return total, [verdict for reduction in reductions for verdict in reduction.finish()]


class TensorChunk(NamedTuple):
    """A part of a tensor, from number ``first`` on, that is encoded and sent as one."""

    codec: Codec
    codec_round: CodecRound
    first: int
    values: torch.Tensor
    total: torch.Tensor
    keep_residual: bool

    def round_at(self, span: slice) -> CodecRound:
        return CodecRound(f"{self.codec_round.name}@{self.first + span.start}", self.codec_round.step)


def cut_chunks(
    codec: Codec, codec_round: CodecRound, values: torch.Tensor, total: torch.Tensor, keep_residual: bool
) -> list[TensorChunk]:
    """Cut a tensor into chunks. With payloads of unknown size the whole tensor is one chunk."""
    size = CHUNK_NUMBERS if codec.is_fixed else max(1, values.numel())
    return [
        TensorChunk(
            codec,
            codec_round,
            first,
            values[first : first + size],
            total[first : first + size],
            keep_residual,
        )
        for first in range(0, values.numel(), size)
    ]


def cut(numel: int, world: int, grain: int) -> list[slice]:
    """Return one shard for each member. The last ones may be shorter or empty."""
    size = grain * -(-numel // (grain * world))
    return [slice(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(world)]


class _ChunkReduction:
    """All-reduce of one chunk: shares to the owners of its shards, sums back from them."""

    def __init__(self, exchange: PayloadExchange, chunk: TensorChunk) -> None:
        self._exchange, self._codec, self._keep_residual = exchange, chunk.codec, chunk.keep_residual
        self._values, self._total = chunk.values, chunk.total
        self._shards = cut(chunk.values.numel(), exchange.world, chunk.codec.grain)
        self._rounds = [chunk.round_at(shard) for shard in self._shards]
        self._own = self._shards[exchange.rank]
        self._verdict = PayloadCheck(PayloadKind.FINE, exchange.rank)
        self._arriving: IncomingPayloads | None = None

    def send_shares(self) -> None:
        own_rank, fine = self._exchange.rank, self._verdict
        payloads: list[torch.Tensor | None] = [None] * self._exchange.world
        try:
            for rank, (shard, codec_round) in enumerate(zip(self._shards, self._rounds, strict=True)):
                if rank != own_rank:
                    payloads[rank] = self._encode(self._values[shard], codec_round)
        except CollectiveError:
            self._verdict = PayloadCheck(PayloadKind.NOT_FINITE, own_rank)
        if not is_finite(self._values[self._own]):
            self._verdict = PayloadCheck(PayloadKind.NOT_FINITE, own_rank)
        if self._verdict != fine:
            payloads = [
                None if rank == own_rank else self._nothing(shard) for rank, shard in enumerate(self._shards)
            ]
        messages = [
            [] if payload is None else [PayloadMessage(self._verdict, payload)] for payload in payloads
        ]
        sizes = self._sizes_for_me([0 if payload is None else payload.numel() for payload in payloads])
        expected = [[] if rank == own_rank else [size] for rank, size in enumerate(sizes)]
        self._arriving = self._exchange.all_to_all(messages, expected, self._values.device)

    def send_sum(self) -> None:
        assert self._arriving is not None
        own_rank = self._exchange.rank
        shares = self._arriving.wait()
        total = torch.zeros_like(self._values[self._own])
        verdict = self._verdict
        for rank in range(self._exchange.world):
            if rank == own_rank:
                total.add_(self._values[self._own])
            else:
                check = self._added(total, shares[rank][0], rank)
                verdict = check if verdict.kind is PayloadKind.FINE else verdict
        payload = self._nothing(self._own)
        if verdict.kind is PayloadKind.FINE:
            try:
                payload = self._encode(total, self._rounds[own_rank])
            except CollectiveError:
                verdict = PayloadCheck(PayloadKind.TOO_LARGE, own_rank)
        if self._keep_residual:
            self._values[self._own] = total
        sizes = self._sizes_of_sums(payload.numel())
        self._arriving = self._exchange.gather(PayloadMessage(verdict, payload), sizes)

    def finish(self) -> list[PayloadCheck]:
        assert self._arriving is not None
        sums = [message for (message,) in self._arriving.wait()]
        for shard, codec_round, (verdict, payload) in zip(self._shards, self._rounds, sums, strict=True):
            if verdict.kind is PayloadKind.FINE:
                self._codec.add(self._total[shard], payload, codec_round)
        return [message.verdict for message in sums]

    def _encode(self, values: torch.Tensor, codec_round: CodecRound) -> torch.Tensor:
        payload = self._codec.encode(values, codec_round)
        if self._keep_residual:
            self._codec.add(values, payload, codec_round, sign=-1.0)
        return payload

    def _added(self, total: torch.Tensor, share: PayloadMessage, rank: int) -> PayloadCheck:
        """Add a share to the total and return its check. A sender reports only on itself."""
        if share.verdict.kind is not PayloadKind.FINE:
            return PayloadCheck(share.verdict.kind, rank)
        try:
            self._codec.add(total, share.payload, self._rounds[self._exchange.rank])
        except ProtocolError:
            return PayloadCheck(PayloadKind.MALFORMED, rank)
        return PayloadCheck(PayloadKind.FINE, rank)

    def _nothing(self, shard: slice) -> torch.Tensor:
        """Return a placeholder for a payload that could not be encoded.

        It has the size that the receiver expects.
        """
        size = self._codec.payload_bytes(shard.stop - shard.start) if self._codec.is_fixed else 0
        return torch.zeros(size, dtype=torch.uint8, device=self._values.device)

    def _max_bytes(self, shard: slice) -> int:
        return self._codec.payload_bytes(shard.stop - shard.start)

    def _sizes_for_me(self, leaving: Sequence[int]) -> list[int]:
        own_rank, world = self._exchange.rank, self._exchange.world
        if self._codec.is_fixed:
            return [self._max_bytes(self._own)] * world
        table = self._exchange.all_gather_numbers(leaving, self._values.device)
        for row in table:
            self._require(
                [(size, self._max_bytes(shard)) for size, shard in zip(row, self._shards, strict=True)]
            )
        return [row[own_rank] for row in table]

    def _sizes_of_sums(self, own: int) -> list[int]:
        max_bytes = [self._max_bytes(shard) for shard in self._shards]
        if self._codec.is_fixed:
            return max_bytes
        sizes = [row[0] for row in self._exchange.all_gather_numbers([own], self._values.device)]
        self._require(list(zip(sizes, max_bytes, strict=True)))
        return sizes

    def _require(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Check the sizes that members announced. All members see all sizes, so all reject the same ones."""
        for size, max_bytes in sizes:
            if not 0 <= size <= max_bytes:
                raise ProtocolError(
                    f"a worker announced {size} bytes, but {self._codec.name} allows {max_bytes}"
                )
