"""Payloads between the members of a process group, each with a verdict on what it was made of.

A member that cannot encode, decode or sum says so in place of a payload, and all learn it together. If it
just raised, the others would wait for it until their time is out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

_HEADER = 8
_ALIGNED = 8


class Kind(IntEnum):
    """What there is to say about a payload."""

    FINE = 0
    NOT_FINITE = 1  # this member's numbers
    MALFORMED = 2  # what came from this member
    TOO_LARGE = 3  # the sum, which this member made


class Verdict(NamedTuple):
    kind: Kind
    rank: int


class Message(NamedTuple):
    """A payload; empty or meaningless unless the verdict is fine."""

    verdict: Verdict
    payload: torch.Tensor


class Arriving:
    """Messages on their way to this member."""

    def __init__(
        self, work: dist.Work, world: int, slots: Mapping[int, torch.Tensor], sizes: Sequence[int]
    ) -> None:
        """``slots``: by sender; ``sizes``: of everybody's payload."""
        self._work, self._world = work, world
        self._slots, self._sizes = slots, sizes

    def wait(self) -> dict[int, Message]:
        """By sender, in rank order."""
        self._work.wait()
        return {sender: self._opened(sender) for sender in sorted(self._slots)}

    def _opened(self, sender: int) -> Message:
        slot, size = self._slots[sender], self._sizes[sender]
        kind, rank = slot[:_HEADER].cpu().view(torch.int32).tolist()
        payload = slot[_HEADER : _HEADER + size]
        if kind not in {one.value for one in Kind} or not 0 <= rank < self._world:
            return Message(Verdict(Kind.MALFORMED, sender), payload)
        return Message(Verdict(Kind(kind), rank), payload)


class Exchange:
    """One process group, any backend that moves uint8; counts the bytes of this member's messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world = group.rank(), group.size()
        self.sent = 0

    def spread(self, messages: Sequence[Message | None], expected: Sequence[int]) -> Arriving:
        """Another message to each member, None to oneself; ``expected``: the size of each one's payload."""
        filled = [message for message in messages if message is not None]
        buffer = _laid_out(filled, [_slot_bytes(one.payload.numel()) for one in filled])
        leaving = [0 if one is None else _slot_bytes(one.payload.numel()) for one in messages]
        coming = [0 if rank == self.rank else _slot_bytes(size) for rank, size in enumerate(expected)]
        arrived = torch.zeros(sum(coming), dtype=torch.uint8, device=buffer.device)
        self.sent += sum(leaving)
        work = self._group.all_to_all_single(arrived, buffer, coming, leaving)
        others = [rank for rank in range(self.world) if rank != self.rank]
        slots = torch.split(arrived, [coming[rank] for rank in others])
        return Arriving(work, self.world, dict(zip(others, slots, strict=True)), expected)

    def gather(self, message: Message, sizes: Sequence[int]) -> Arriving:
        """The same message to all; ``sizes``: of everybody's payload."""
        room = _slot_bytes(max(sizes))
        buffer = _laid_out([message], [room])
        arrived = torch.zeros(self.world * room, dtype=torch.uint8, device=buffer.device)
        self.sent += (self.world - 1) * room
        work = self._group.all_gather_single(arrived, buffer)
        return Arriving(work, self.world, dict(enumerate(torch.split(arrived, room))), sizes)

    def share(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Some numbers of each member to all, in rank order."""
        own = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        arrived = torch.zeros(self.world * own.numel(), dtype=torch.int64, device=device)
        self.sent += (self.world - 1) * own.numel() * 8
        self._group.all_gather_single(arrived, own).wait()
        table: list[list[int]] = arrived.view(self.world, -1).tolist()
        return table


def _slot_bytes(payload: int) -> int:
    return _HEADER + -(-payload // _ALIGNED) * _ALIGNED


def _laid_out(messages: Sequence[Message], sizes: Sequence[int]) -> torch.Tensor:
    """One after the other, zeros between them: nothing of this process's memory is sent by accident."""
    device = messages[0].payload.device
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    first = 0
    for message, size in zip(messages, sizes, strict=True):
        verdict = torch.tensor([message.verdict.kind, message.verdict.rank], dtype=torch.int32)
        buffer[first : first + _HEADER] = verdict.view(torch.uint8).to(device)
        buffer[first + _HEADER : first + _HEADER + message.payload.numel()] = message.payload
        first += size
    return buffer
