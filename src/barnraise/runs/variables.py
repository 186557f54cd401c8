"""Variables of a run that a person set: the run spec has their names, and never their values. Pure.

A machine accepts values only if they match the digest in the signed spec. The salt travels with the values,
so that the digest does not help to guess a short one.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.agent_client.run_options import Digest, Variables, Word
from barnraise.core.errors import RunError
from barnraise.core.units import format_size

MAX_BYTES = 128 << 10  # of all names and values; they travel in one message
_PURPOSE = b"barnraise run variables 1\0"
_encoder = msgspec.msgpack.Encoder(order="deterministic")


class VariableNames(msgspec.Struct, frozen=True, array_like=True):
    """Names of the variables, and a commitment to their values."""

    names: Annotated[tuple[Word, ...], Meta(max_length=256)] = ()
    digest: Digest = b""


class VariableValues(msgspec.Struct, frozen=True, array_like=True):
    """Values of the variables, for the machines of the run only."""

    salt: Annotated[bytes, Meta(min_length=32, max_length=32)]
    values: Variables

    @property
    def names(self) -> VariableNames:
        """Return what the run spec says about these values."""
        digest = hashlib.sha256(_PURPOSE + _encoder.encode(self)).digest()
        return VariableNames(tuple(name for name, _ in self.values), digest)


def seal(variables: Variables) -> VariableValues | None:
    """Return values with a new salt; None if there are none. Raise RunError if they are too long."""
    if not variables:
        return None
    size = len(_encoder.encode(variables))
    if size > MAX_BYTES:
        raise RunError(
            f"the variables of --set have {format_size(size)}, at most {format_size(MAX_BYTES)} are possible",
            hint="Put long values into a file in the folder.",
        )
    return VariableValues(secrets.token_bytes(32), tuple(dict(variables).items()))
