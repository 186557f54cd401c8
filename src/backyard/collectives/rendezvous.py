"""How the ranks of a new group find each other: through torch's store, which is trusted for nothing else.

Each rank publishes where it can be reached; who it really is, its link proves. Rank 0 adds a fresh name, so
that a group built anew can never be taken for the one before it.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import msgspec
import torch.distributed as dist

from backyard.collectives.messages import Member
from backyard.core.errors import OperationTimeout, ProtocolError

_MAX_ENTRY = 64 << 10
_MAX_ADDRESSES = 32


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    member: Member
    fresh: str


def exchange_members(
    store: dist.Store, rank: int, world: int, member: Member, timeout_s: float
) -> tuple[tuple[Member, ...], str]:
    """Everyone's place, by rank, and the group's fresh name."""
    store.set(_key(rank), msgspec.msgpack.encode(_Entry(member, secrets.token_hex(8))))
    deadline = time.monotonic() + timeout_s
    entries = []
    for other in range(world):
        _await(store, other, world, deadline, timeout_s)
        entries.append(_read(store.get(_key(other)), other))
    return tuple(entry.member for entry in entries), entries[0].fresh


def _await(store: dist.Store, other: int, world: int, deadline: float, timeout_s: float) -> None:
    try:
        store.wait([_key(other)], timedelta(seconds=max(0.01, deadline - time.monotonic())))
    except RuntimeError as error:  # torch's store errors all derive from it
        missing = [rank for rank in range(other, world) if not _is_there(store, rank)]
        names = ", ".join(f"rank {rank}" for rank in missing) or f"rank {other}"
        raise OperationTimeout(
            f"{names} did not come to the rendezvous within {timeout_s:g} s ({error})",
            late=tuple(missing),
            hint="Start the missing ranks, and check that all use the same store address and world size.",
        ) from error


def _is_there(store: dist.Store, rank: int) -> bool:
    try:
        return bool(store.check([_key(rank)]))
    except RuntimeError:
        return False


def _read(data: bytes, rank: int) -> _Entry:
    try:
        if len(data) > _MAX_ENTRY:
            raise msgspec.DecodeError("too long")
        entry = msgspec.msgpack.decode(data, type=_Entry)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"rank {rank} published no place that can be read ({error})") from error
    member = entry.member
    if len(member.worker) != 16 or not 0 < member.port < 65536 or len(member.addresses) > _MAX_ADDRESSES:
        raise ProtocolError(f"rank {rank} published a place that cannot be")
    return entry


def _key(rank: int) -> str:
    return f"backyard/{rank}"
