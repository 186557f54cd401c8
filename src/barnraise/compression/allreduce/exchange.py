"""Payload exchange between the members of a process group, each payload with a check result.

A member that cannot encode, decode or sum sends the reason in place of a payload, so all members fail
together. If it raised an error instead, the others would wait until their timeout.
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
    """Result of checking a payload."""

    FINE = 0
    NOT_FINITE = 1  # this member's numbers
    MALFORMED = 2  # payload of this member
    TOO_LARGE = 3  # sum that this member computed


class PayloadCheck(NamedTuple):
    kind: PayloadKind
    rank: int


class PayloadMessage(NamedTuple):
    """A payload with its verdict. It is empty or meaningless unless the verdict is fine."""

    verdict: PayloadCheck
    payload: torch.Tensor


class IncomingPayloads:
    """Messages that are on their way to this member."""

    def __init__(
        self,
        work: dist.Work,
        world: int,
        arrived: torch.Tensor,
        sizes: Sequence[Sequence[int]],
        slot_bytes: int | None = None,
    ) -> None:
        """Create the receiver of messages. ``sizes``: sizes of every rank's payloads.

        ``slot_bytes``: bytes of each message, if all messages have the same size.
        """
        self._work, self._world, self._arrived = work, world, arrived
        self._sizes, self._uniform_slot_bytes = sizes, slot_bytes

    def wait(self) -> list[list[PayloadMessage]]:
        """Wait for the messages and return them by sender."""
        self._work.wait()
        messages: list[list[PayloadMessage]] = []
        first = 0
        for sender, sizes in enumerate(self._sizes):
            messages.append([])
            for size in sizes:
                messages[sender].append(self._parse_slot(sender, self._arrived[first:], size))
                first += _slot_bytes(size) if self._uniform_slot_bytes is None else self._uniform_slot_bytes
        return messages

    def _parse_slot(self, sender: int, slot: torch.Tensor, size: int) -> PayloadMessage:
        kind, rank = slot[:_HEADER].cpu().view(torch.int32).tolist()
        payload = slot[_HEADER : _HEADER + size]
        if kind not in {member.value for member in PayloadKind} or not 0 <= rank < self._world:
            return PayloadMessage(PayloadCheck(PayloadKind.MALFORMED, sender), payload)
        return PayloadMessage(PayloadCheck(PayloadKind(kind), rank), payload)


class PayloadExchange:
    """Exchange over one process group, on any backend that moves uint8. It counts this member's bytes.

    ``sites``: the ranks of each site, if there are several. ``crossed``: bytes that left this member's
    site.
    """

    def __init__(self, group: dist.ProcessGroup, sites: Sequence[Sequence[int]] = ()) -> None:
        self._group = group
        self.rank, self.world = group.rank(), group.size()
        self.sites = _validate_sites(sites, self.world)
        self.site = next((number for number, site in enumerate(self.sites) if self.rank in site), 0)
        self._near = frozenset(self.sites[self.site] if self.sites else range(self.world))
        self.sent = self.crossed = 0

    def all_to_all(
        self,
        messages: Sequence[Sequence[PayloadMessage]],
        expected: Sequence[Sequence[int]],
        device: torch.device,
    ) -> IncomingPayloads:
        """Send different messages to each member. ``expected``: the payload sizes from each member."""
        filled = [message for row in messages for message in row]
        buffer = _pack_messages(filled, [_slot_bytes(message.payload.numel()) for message in filled], device)
        leaving = [sum(_slot_bytes(message.payload.numel()) for message in row) for row in messages]
        coming = [sum(map(_slot_bytes, sizes)) for sizes in expected]
        arrived = torch.zeros(sum(coming), dtype=torch.uint8, device=device)
        self._count(leaving)
        work = self._group.all_to_all_single(arrived, buffer, coming, leaving)
        return IncomingPayloads(work, self.world, arrived, expected)

    def gather(self, message: PayloadMessage, sizes: Sequence[int]) -> IncomingPayloads:
        """Send one message to all members. ``sizes``: the payload size of each member."""
        slot_bytes = _slot_bytes(max(sizes))
        device = message.payload.device
        buffer = _pack_messages([message], [slot_bytes], device)
        arrived = torch.zeros(self.world * slot_bytes, dtype=torch.uint8, device=device)
        self._count([slot_bytes] * self.world)
        work = self._group.all_gather_single(arrived, buffer)
        return IncomingPayloads(work, self.world, arrived, [[size] for size in sizes], slot_bytes)

    def all_gather_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Gather a few integers of each member on all members, in rank order."""
        own = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        arrived = torch.zeros(self.world * own.numel(), dtype=torch.int64, device=device)
        self._count([own.numel() * 8] * self.world)
        self._group.all_gather_single(arrived, own).wait()
        table: list[list[int]] = arrived.view(self.world, -1).tolist()
        return table

    def _count(self, leaving: Sequence[int]) -> None:
        """Count the bytes for each rank, except those for this rank."""
        self.sent += sum(leaving) - leaving[self.rank]
        self.crossed += sum(size for rank, size in enumerate(leaving) if rank not in self._near)


def _validate_sites(sites: Sequence[Sequence[int]], world: int) -> tuple[tuple[int, ...], ...]:
    """Return the sites, or nothing if there is one site or every member has its own."""
    ranks = sorted(rank for site in sites for rank in site)
    if sites and (ranks != list(range(world)) or not all(sites)):
        raise OperationMismatch(
            f"the sites {[list(site) for site in sites]} do not name each of {world} ranks once",
            hint="List every rank in exactly one site, or leave the sites out.",
        )
    return tuple(map(tuple, sites)) if 1 < len(sites) < world else ()


def _slot_bytes(payload: int) -> int:
    return _HEADER + -(-payload // _ALIGNED) * _ALIGNED


def _pack_messages(
    messages: Sequence[PayloadMessage], sizes: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Pack messages one after the other. Gaps are zero, so that no memory of this process leaks."""
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    first = 0
    for message, size in zip(messages, sizes, strict=True):
        verdict = torch.tensor([message.verdict.kind, message.verdict.rank], dtype=torch.int32)
        buffer[first : first + _HEADER] = verdict.view(torch.uint8).to(device)
        buffer[first + _HEADER : first + _HEADER + message.payload.numel()] = message.payload
        first += size
    return buffer
