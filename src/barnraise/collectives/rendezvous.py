"""Rendezvous of a new group through torch's store, which is trusted for nothing else.

Each rank publishes its network address; its link proves its identity. Rank 0 adds a random nonce, so that a
rebuilt group cannot be confused with the previous one.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store

from barnraise.collectives.messages import GroupMember
from barnraise.core.errors import OperationTimeout, ProtocolError
from barnraise.core.flow.wait_reporter import WaitReporter

log = logging.getLogger("barnraise.collectives")

_FIRST_REPORT_S = 10.0
_MAX_REPORT_S = 60.0
_MIN_WAIT_S = 0.1  # for torch, 0 means without end
_MAX_ENTRY = 64 << 10
_MAX_ADDRESSES = 32
_MAX_NONCE = 64
_START_HINT = "Start the missing ranks, and check that all use the same store address and world size."


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    member: GroupMember
    nonce: str


def exchange_members(
    store: Store, rank: int, world: int, member: GroupMember, timeout_s: float
) -> tuple[tuple[GroupMember, ...], str]:
    """Publish this rank's member. Return the members of all ranks, and the group's nonce."""
    entry = encode_entry(member)
    store.set(_key(rank), entry)  # type: ignore[arg-type]  # bytes are taken too, the stub knows only text
    keys = [_key(other) for other in range(world)]
    wait_for_ranks(store, keys, timeout_s)
    return read_entries(read_values(store, keys))


def encode_entry(member: GroupMember) -> bytes:
    """Return what a rank publishes of itself: its member, and a nonce for the group."""
    return msgspec.msgpack.encode(_Entry(member, secrets.token_hex(8)))


def read_entries(published: Sequence[bytes]) -> tuple[tuple[GroupMember, ...], str]:
    """Return the members of all ranks, and the nonce of rank 0. Raise ProtocolError for an invalid entry."""
    entries = [_read(data, rank) for rank, data in enumerate(published)]
    workers = [entry.member.worker for entry in entries]
    for rank, worker in enumerate(workers):
        if workers.index(worker) != rank:
            raise ProtocolError(
                f"ranks {workers.index(worker)} and {rank} are one worker",
                hint="Give each process its own rank, and each group a store (or store prefix) of its own.",
            )
    return tuple(entry.member for entry in entries), entries[0].nonce


def read_values(store: Store, keys: list[str]) -> list[bytes]:
    """Read the keys in one round trip if the store can. With 64 ranks on a slow link they add up."""
    if store.has_extended_api():  # type: ignore[attr-defined]  # the stub lacks it
        return store.multi_get(keys)
    return [store.get(key) for key in keys]


def wait_for_ranks(store: Store, keys: Sequence[str], timeout_s: float, hint: str = _START_HINT) -> None:
    """Wait until each rank has set its key, and log now and then which ranks have not.

    Raise OperationTimeout with the missing ranks and the hint, ProtocolError if the store fails.
    """
    deadline = time.monotonic() + timeout_s
    reporter = WaitReporter(_FIRST_REPORT_S, 2 * _FIRST_REPORT_S, max_interval_s=_MAX_REPORT_S)
    while True:
        start = time.monotonic()
        left = deadline - start
        slice_s = max(_MIN_WAIT_S, min(left, _FIRST_REPORT_S))
        try:
            store.wait(list(keys), timedelta(seconds=slice_s))
            return
        except RuntimeError as error:  # torch's store errors all derive from it
            missing = [rank for rank, key in enumerate(keys) if not _has_key(store, key)]
            has_failed = time.monotonic() - start < slice_s / 2
            if not missing and not has_failed:
                return
            if left > slice_s and not has_failed:
                if reporter.is_due():
                    log.warning(
                        "waiting for %s to call init_process_group, for %.0f s so far",
                        _names(missing),
                        reporter.waited_s,
                    )
                continue
            if has_failed or not missing:
                raise ProtocolError(
                    f"the store of the rendezvous failed ({error})",
                    hint="Check that the process that holds the store is alive and reachable.",
                ) from error
            raise OperationTimeout(
                f"{_names(missing)} did not call init_process_group within {timeout_s:g} s",
                late=tuple(missing),
                hint=hint,
            ) from error


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _has_key(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def _read(data: bytes, rank: int) -> _Entry:
    try:
        if len(data) > _MAX_ENTRY:
            raise msgspec.DecodeError("too long")
        entry = msgspec.msgpack.decode(data, type=_Entry)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"rank {rank} published an entry that cannot be decoded ({error})") from error
    check_member(entry.member, f"the entry of rank {rank}")
    if len(entry.nonce) > _MAX_NONCE:
        raise ProtocolError(f"the entry of rank {rank} is invalid")
    return entry


def check_member(member: GroupMember, source: str) -> None:
    """Raise ProtocolError if a member that another rank published cannot be one."""
    is_valid = len(member.worker) == 16 and 0 < member.port < 65536
    if not is_valid or len(member.addresses) > _MAX_ADDRESSES:
        raise ProtocolError(f"{source} is invalid")


def _key(rank: int) -> str:
    return f"barnraise/{rank}"
