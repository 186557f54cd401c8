"""Handover of a hub to its mirror: a signed line that expires, and that the hub can withdraw.

A withdrawal is a fact of the hub's log. A mirror copies it with the log, so it reaches a mirror that follows.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import HubError, ProtocolError
from barnraise.hub.protocol.messages import Moment, NodeText
from barnraise.hub.storage.create import FOLLOWS, FOUNDING, SUCCEEDS, WITHDRAWN, HubFounding, hub_key
from barnraise.hub.storage.directory_lock import lock_directory, read_facts
from barnraise.hub.storage.log import HubLog, change, read_fact
from barnraise.identity.keys import NodeKey, verify_signature
from barnraise.identity.node_id import NodeId

PREFIX = "barnraise-succession:"
_SIGNATURE = 64


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """Statement that one hub succeeds another, signed by the run's owner or the old hub."""

    hub: Annotated[bytes, Meta(min_length=32, max_length=32)]
    successor: Annotated[bytes, Meta(min_length=32, max_length=32)]
    time: Moment
    expires: Moment


class WithdrawnHandovers(msgspec.Struct, frozen=True):
    """Time up to which the handovers of a successor are withdrawn, by its id."""

    until: dict[NodeText, Moment] = {}  # msgspec copies it


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handover)


def sign_handover(signer: NodeKey, hub: NodeId, successor: NodeId, time: int, expires: int) -> str:
    """Return a signed handover as text."""
    data = _encoder.encode(Handover(hub.raw, successor.raw, time, expires))
    return PREFIX + base64.urlsafe_b64encode(signer.sign(PREFIX.encode() + data) + data).decode()


def read_handover(text: str, signers: Sequence[NodeId]) -> Handover:
    """Parse and verify a handover. Raise HubError unless one of these signers signed it."""
    try:
        data = base64.b64decode(text.strip().removeprefix(PREFIX), altchars=b"-_", validate=True)
        signature, payload = data[:_SIGNATURE], data[_SIGNATURE:]
        if any(verify_signature(signer, signature, PREFIX.encode() + payload) for signer in signers):
            return decode(_decoder, payload, "the handover cannot be read")
    except (ValueError, ProtocolError) as error:
        raise HubError("this is not a handover of a hub", hint=_COPY_AGAIN) from error
    raise HubError("neither the owner of the run nor its hub has signed this", hint=_COPY_AGAIN)


def withdraw_handovers(directory: Path, successor: NodeId, time: int) -> None:
    """Withdraw all handovers that this successor got up to this time; the hub may be running."""
    log = HubLog(directory)
    try:

        def withdraw(log: HubLog) -> None:
            known = _withdrawn(log.read_facts())
            log.set_fact(WITHDRAWN, WithdrawnHandovers({**known.until, str(successor): time}))

        log.transact([withdraw])
    finally:
        log.close()


def take_over(directory: Path, word: str, clock: float) -> None:
    """Turn the mirror in this directory into the run's hub.

    Raise HubError unless the handover names this mirror and holds now, or while the mirror still follows.
    """
    with lock_directory(directory):
        facts = read_facts(directory)
        founding, follows = read_fact(facts, FOUNDING, HubFounding), facts.get(FOLLOWS)
        if founding is None or follows is None:
            raise HubError(f"there is no mirror in {directory}", hint="Run `barnraise hub follow` first.")
        handover = read_handover(word, (NodeId.parse(founding.owner), NodeId(follows)))
        _check(handover, _withdrawn(facts), clock)
        if (handover.hub, handover.successor) != (follows, hub_key(directory).id.raw):
            raise HubError("the handover names other hubs", hint=_COPY_AGAIN)
        log = HubLog(directory)
        try:
            log.transact([change(HubLog.set_fact, SUCCEEDS, word.strip().encode())])
        finally:
            log.close()


def _check(handover: Handover, withdrawn: WithdrawnHandovers, clock: float) -> None:
    """Raise HubError if the handover has expired, or if the hub has withdrawn it."""
    if clock > handover.expires:
        raise HubError("the handover has expired", hint=_NEW_WORD)
    if handover.time <= withdrawn.until.get(str(NodeId(handover.successor)), -1):
        raise HubError("the hub has withdrawn this handover", hint=_NEW_WORD)


def _withdrawn(facts: dict[str, bytes]) -> WithdrawnHandovers:
    return read_fact(facts, WITHDRAWN, WithdrawnHandovers) or WithdrawnHandovers()


_COPY_AGAIN = "Copy the whole line that the hub's machine printed."
_NEW_WORD = "Ask the owner of the hub for a new one: `barnraise hub hand-over`."
