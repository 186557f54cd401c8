"""Reconfiguration: a group is opened again with the members that a list of handles names.

A handle has what a rank publishes in an ordinary rendezvous: its worker id, port and addresses. Links prove
the identity, so a handle that names another machine gets no connection. A random number in each handle keeps
two groups of the same ranks apart.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Callable, Collection, Sequence

import msgspec

from barnraise.collectives.c10d.operations import OpenedGroup
from barnraise.collectives.messages import GroupMember
from barnraise.collectives.rendezvous import check_member
from barnraise.core.errors import CollectiveError, ProtocolError

OpenGroup = Callable[[int, tuple[GroupMember, ...], str, float], OpenedGroup]
_MAX_HANDLE = 64 << 10
_NONCE_BYTES = 16


class ReconfigureHandle(msgspec.Struct, frozen=True, array_like=True):
    """The address of one rank, and the random number of its group object."""

    member: GroupMember
    nonce: bytes


def encode_handle(handle: ReconfigureHandle) -> str:
    """Return a handle as text, as torch passes it on."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(handle)).decode()


def decode_handle(text: str) -> ReconfigureHandle:
    """Return the handle in a text of another rank. Raise ProtocolError if it is none."""
    try:
        if len(text) > _MAX_HANDLE:
            raise msgspec.DecodeError("too long")
        data = base64.b64decode(text, altchars=b"-_", validate=True)
        handle = msgspec.msgpack.decode(data, type=ReconfigureHandle)
    except (ValueError, RecursionError, binascii.Error) as error:
        raise ProtocolError(f"a reconfigure handle cannot be decoded ({error})") from error
    check_member(handle.member, "a reconfigure handle")
    if len(handle.nonce) != _NONCE_BYTES:
        raise ProtocolError("a reconfigure handle is invalid")
    return handle


def ranked_handles(texts: Collection[str]) -> tuple[ReconfigureHandle, ...]:
    """Return the handles by rank: in the order of a list, or by worker id if they have no order."""
    handles = [decode_handle(text) for text in texts]
    if not isinstance(texts, Sequence):
        handles.sort(key=lambda handle: handle.member.worker)
    if len({handle.member.worker for handle in handles}) != len(handles):
        raise ProtocolError("two reconfigure handles name one worker", hint="Pass one handle per rank.")
    return tuple(handles)


def group_name(uuid: int, handles: Sequence[ReconfigureHandle]) -> str:
    """Return the name of the new group, which all its members compute alike."""
    text = msgspec.msgpack.encode((uuid, [(handle.member.worker, handle.nonce) for handle in handles]))
    return hashlib.sha256(text).hexdigest()[:32]


class Reconfiguration:
    """The reconfigurations of one group object on one rank."""

    def __init__(self, member: GroupMember, open_group: OpenGroup) -> None:
        self._own = ReconfigureHandle(member, secrets.token_bytes(_NONCE_BYTES))
        self._open_group = open_group
        self._used: set[int] = set()

    def handle(self) -> str:
        return encode_handle(self._own)

    def open(self, uuid: int, texts: Collection[str], timeout_s: float) -> OpenedGroup:
        """Open the group of these handles. Every member calls it with the same uuid and handles."""
        if uuid in self._used:
            raise CollectiveError(f"uuid {uuid} was already used", hint="Pass a new uuid each time.")
        handles = ranked_handles(texts)
        if self._own not in handles:
            raise CollectiveError(
                "this rank is not among the handles", hint="Call reconfigure only on ranks of the new group."
            )
        self._used.add(uuid)
        members = tuple(handle.member for handle in handles)
        return self._open_group(handles.index(self._own), members, group_name(uuid, handles), timeout_s)
