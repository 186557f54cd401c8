"""Preface: the first bytes of a connection, before TLS, with its route and target. Pure.

Layout (little-endian) in ``docs/wire/preface.md``, fixed by ``tests/vectors/preface.json``. A preface with a
wrong MAC is never answered, so that unknown peers see neither a banner nor a certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass

from barnraise.core.errors import ProtocolError
from barnraise.identity import NodeId

VERSION_MIN = 1
VERSION_MAX = 1
ROUTE_PAIRING = 0  # only while a code or a pre-shared key is open
ROUTE_WORKER = 1
ROUTE_AGENT = 2  # heartbeats and decisions
ROUTE_AGENT_BULK = 3  # everything large between agents, so that it never delays a heartbeat
ROUTE_AGENT_SHIP = 4  # files of runs, so that they never delay what a training waits for
AGENT_ROUTES = (ROUTE_AGENT, ROUTE_AGENT_BULK, ROUTE_AGENT_SHIP)
ROUTE_NAMES = {ROUTE_AGENT: "control", ROUTE_AGENT_BULK: "bulk", ROUTE_AGENT_SHIP: "files"}

TARGET_BYTES = 16
ANY_AGENT = bytes(TARGET_BYTES)  # for the routes of agents: any agent
# The secret of a code's pairing route. Known to all: there the MAC proves only that the dialler speaks our
# language and read the offer; the code itself is proven later. A pre-shared key brings its own secret.
PAIRING_KEY = hashlib.sha256(b"barnraise: opens the pairing route, proves nothing").digest()

_PREFACE_MAGIC = b"BARNRAIS"
_FIELDS = struct.Struct("<8sHHBBH16s16s")
_MAC_BYTES = 32
PREFACE_BYTES = _FIELDS.size + _MAC_BYTES
_PLAINTEXT = 1

_ANSWER_MAGIC = b"BYOK"
_ANSWER = struct.Struct("<4sHH")
ANSWER_BYTES = _ANSWER.size
_NO_ROUTE = 2
_NO_VERSION = 4

_SECRET_BYTES_MIN = 32
_MAC_PURPOSE = b"barnraise preface mac 1"


# The secret that guards a route to a target here; None if there is no such route or target.
KeyFor = Callable[[int, bytes], "bytes | None"]


@dataclass(frozen=True)
class Preface:
    """First message of a dialler.

    ``target``: the id of a worker; the start of an agent's NodeId, or zeros for any agent; or the tag of a
    pairing offer.
    """

    target: bytes
    nonce: bytes
    route: int = ROUTE_WORKER
    plaintext: bool = False
    version_min: int = VERSION_MIN
    version_max: int = VERSION_MAX


@dataclass(frozen=True)
class PrefaceAnswer:
    """Answer to a preface with a right MAC: the version to use, or the reason of a rejection."""

    version: int
    plaintext: bool = False
    refusal: str | None = None


def encode(preface: Preface, secret: bytes) -> bytes:
    fields = _FIELDS.pack(
        _PREFACE_MAGIC,
        preface.version_min,
        preface.version_max,
        preface.route,
        _PLAINTEXT if preface.plaintext else 0,
        0,
        preface.target,
        preface.nonce,
    )
    return fields + _mac(fields, secret)


def parse(data: bytes, key_for: KeyFor) -> Preface:
    """Parse exactly PREFACE_BYTES; raise ProtocolError unless the right secret made them."""
    if len(data) != PREFACE_BYTES:
        raise ProtocolError(f"a preface has {PREFACE_BYTES} bytes, this has {len(data)}")
    fields, mac = data[: _FIELDS.size], data[_FIELDS.size :]
    magic, version_min, version_max, route, flags, reserved, target, nonce = _FIELDS.unpack(fields)
    if magic != _PREFACE_MAGIC or reserved or flags & ~_PLAINTEXT:
        raise ProtocolError("the preface has a wrong form")
    secret = key_for(route, target)
    if secret is None:
        raise ProtocolError(f"route {route} does not exist here")
    if not hmac.compare_digest(mac, _mac(fields, secret)):
        raise ProtocolError("the preface was not made with this discovery secret")
    if not 1 <= version_min <= version_max:
        raise ProtocolError(f"the preface offers no protocol version ({version_min} to {version_max})")
    return Preface(target, nonce, route, bool(flags & _PLAINTEXT), version_min, version_max)


def target_at(secret: bytes, address: str, port: int) -> bytes:
    """Return the target for an agent of unknown id at this address.

    It is bound to the address, so that an attacker cannot replay our preface at another address.
    """
    place = f"{address}|{port}".encode()
    return hmac.digest(secret, b"barnraise preface place 1\0" + place, hashlib.sha256)[:TARGET_BYTES]


def target_of(node: NodeId) -> bytes:
    """Return the target that names an agent."""
    return node.raw[:TARGET_BYTES]


def negotiate(version_min: int, version_max: int) -> int | None:
    """Return the newest version that both we and a peer with this range support."""
    version = min(version_max, VERSION_MAX)
    return version if version >= max(version_min, VERSION_MIN) else None


def encode_answer(version: int, *, plaintext: bool = False) -> bytes:
    """Encode an acceptance with the version to use."""
    return _ANSWER.pack(_ANSWER_MAGIC, version, _PLAINTEXT if plaintext else 0)


def refuse_route() -> bytes:
    """Encode a rejection: the secret is right, but the target is not registered here."""
    return _ANSWER.pack(_ANSWER_MAGIC, 0, _NO_ROUTE)


def refuse_version() -> bytes:
    """Encode a rejection: the secret is right, but there is no common protocol version."""
    return _ANSWER.pack(_ANSWER_MAGIC, 0, _NO_VERSION)


def parse_answer(data: bytes) -> PrefaceAnswer:
    if len(data) != ANSWER_BYTES:
        raise ProtocolError(f"an answer has {ANSWER_BYTES} bytes, this has {len(data)}")
    magic, version, flags = _ANSWER.unpack(data)
    if magic != _ANSWER_MAGIC:
        raise ProtocolError("the port that was dialled does not belong to Barnraise")
    if version and not flags & ~_PLAINTEXT:
        return PrefaceAnswer(version, plaintext=bool(flags))
    if not version and flags == _NO_ROUTE:
        return PrefaceAnswer(0, refusal="no such worker is registered there")
    if not version and flags == _NO_VERSION:
        return PrefaceAnswer(0, refusal="there is no common protocol version")
    raise ProtocolError("the answer to the preface has a wrong form")


def _mac(fields: bytes, secret: bytes) -> bytes:
    if len(secret) < _SECRET_BYTES_MIN:
        raise ProtocolError(
            f"a discovery secret has at least {_SECRET_BYTES_MIN} bytes, this has {len(secret)}",
            hint="Delete the secret file and let Barnraise make a new one, then share it.",
        )
    # A key of its own, so that this MAC can never be mistaken for another use of the secret.
    key = hmac.digest(secret, _MAC_PURPOSE, hashlib.sha256)
    return hmac.digest(key, fields, hashlib.sha256)
