"""Payloads between the members of a process group, each with a verdict on what it was made of.

A member that cannot encode, decode or sum says so in place of a payload, and all learn it together. If it
just raised, the others would wait for it until their time is out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from barnraise.core.errors import OperationMismatch

_HEADER = 8
_ALIGNED = 8


class PayloadKind(IntEnum):
    """What there is to say about a payload."""

    FINE = 0
    NOT_FINITE = 1  # this member's numbers
    MALFORMED = 2  # what came from this member
    TOO_LARGE = 3  # the sum, which this member made


class PayloadCheck(NamedTuple):
    kind: PayloadKind
    rank: int


class PayloadMessage(NamedTuple):
    """A payload; empty or meaningless unless the verdict is fine."""

    verdict: PayloadCheck
    payload: torch.Tensor


class IncomingPayload:
    """Messages on their way to this member."""

    def __init__(
        self,
        work: dist.Work,
        world: int,
        arrived: torch.Tensor,
        sizes: Sequence[Sequence[int]],
        room: int | None = None,
    ) -> None:
        """``sizes``: of every rank's payloads; ``room``: for each message, where all take as much."""
        self._work, self._world, self._arrived = work, world, arrived
        self._sizes, self._room = sizes, room

    def wait(self) -> list[list[PayloadMessage]]:
        """By sender."""
        self._work.wait()
        found: list[list[PayloadMessage]] = []
        first = 0
        for sender, sizes in enumerate(self._sizes):
            found.append([])
            for size in sizes:
                found[sender].append(self._opened(sender, self._arrived[first:], size))
                first += _slot_bytes(size) if self._room is None else self._room
        return found

    def _opened(self, sender: int, slot: torch.Tensor, size: int) -> PayloadMessage:
        kind, rank = slot[:_HEADER].cpu().view(torch.int32).tolist()
        payload = slot[_HEADER : _HEADER + size]
        if kind not in {one.value for one in PayloadKind} or not 0 <= rank < self._world:
            return PayloadMessage(PayloadCheck(PayloadKind.MALFORMED, sender), payload)
        return PayloadMessage(PayloadCheck(PayloadKind(kind), rank), payload)


class PayloadExchange:
    """One process group, any backend that moves uint8; counts the bytes of this member's messages.

    ``sites``: the ranks of each site, if there are several; ``crossed`` are the bytes that left this one's.
    """

    def __init__(self, group: dist.ProcessGroup, sites: Sequence[Sequence[int]] = ()) -> None:
        self._group = group
        self.rank, self.world = group.rank(), group.size()
        self.sites = _checked(sites, self.world)
        self.site = next((number for number, site in enumerate(self.sites) if self.rank in site), 0)
        self._near = frozenset(self.sites[self.site] if self.sites else range(self.world))
        self.sent = self.crossed = 0

    def spread(
        self,
        messages: Sequence[Sequence[PayloadMessage]],
        expected: Sequence[Sequence[int]],
        device: torch.device,
    ) -> IncomingPayload:
        """Other messages to each member, some to none; ``expected``: the sizes of each one's payloads."""
        filled = [message for some in messages for message in some]
        buffer = _laid_out(filled, [_slot_bytes(one.payload.numel()) for one in filled], device)
        leaving = [sum(_slot_bytes(one.payload.numel()) for one in some) for some in messages]
        coming = [sum(map(_slot_bytes, sizes)) for sizes in expected]
        arrived = torch.zeros(sum(coming), dtype=torch.uint8, device=device)
        self._count(leaving)
        work = self._group.all_to_all_single(arrived, buffer, coming, leaving)
        return IncomingPayload(work, self.world, arrived, expected)

    def gather(self, message: PayloadMessage, sizes: Sequence[int]) -> IncomingPayload:
        """The same message to all; ``sizes``: of everybody's payload."""
        room = _slot_bytes(max(sizes))
        device = message.payload.device
        buffer = _laid_out([message], [room], device)
        arrived = torch.zeros(self.world * room, dtype=torch.uint8, device=device)
        self._count([room] * self.world)
        work = self._group.all_gather_single(arrived, buffer)
        return IncomingPayload(work, self.world, arrived, [[size] for size in sizes], room)

    def share(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Some numbers of each member to all, in rank order."""
        own = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        arrived = torch.zeros(self.world * own.numel(), dtype=torch.int64, device=device)
        self._count([own.numel() * 8] * self.world)
        self._group.all_gather_single(arrived, own).wait()
        table: list[list[int]] = arrived.view(self.world, -1).tolist()
        return table

    def _count(self, leaving: Sequence[int]) -> None:
        """``leaving``: bytes for each rank; what is for oneself goes nowhere."""
        self.sent += sum(leaving) - leaving[self.rank]
        self.crossed += sum(size for rank, size in enumerate(leaving) if rank not in self._near)


def _checked(sites: Sequence[Sequence[int]], world: int) -> tuple[tuple[int, ...], ...]:
    """None, where there is nothing to tell apart: one site, or every member at its own."""
    named = sorted(rank for site in sites for rank in site)
    if sites and (named != list(range(world)) or not all(sites)):
        raise OperationMismatch(
            f"the sites {[list(site) for site in sites]} do not name each of {world} ranks once",
            hint="List every rank in exactly one site, or leave the sites out.",
        )
    return tuple(map(tuple, sites)) if 1 < len(sites) < world else ()


def _slot_bytes(payload: int) -> int:
    return _HEADER + -(-payload // _ALIGNED) * _ALIGNED


def _laid_out(messages: Sequence[PayloadMessage], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """One after the other, zeros between them: nothing of this process's memory is sent by accident."""
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    first = 0
    for message, size in zip(messages, sizes, strict=True):
        verdict = torch.tensor([message.verdict.kind, message.verdict.rank], dtype=torch.int32)
        buffer[first : first + _HEADER] = verdict.view(torch.uint8).to(device)
        buffer[first + _HEADER : first + _HEADER + message.payload.numel()] = message.payload
        first += size
    return buffer
