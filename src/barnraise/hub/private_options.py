"""Options of a hub's process that other users of its machine must not see: invites and secret addresses.

Every user can read the arguments of a process. So these options are in a file that only its user can read.
The process deletes the file once it has read it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import HubError, ProtocolError
from barnraise.hub.protocol.messages import Address
from barnraise.identity.private_file import create_private, read_private

_Text = Annotated[str, Meta(max_length=8000)]


class PrivateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Invites and addresses that a hub's process starts with."""

    follow: _Text = ""  # invite of the hub to mirror
    parent: _Text = ""  # invite of the hub above, for a region
    offer: Annotated[tuple[Address, ...], Meta(max_length=8)] = ()  # addresses for the parent's members
    pinned: bool = True  # no proxy ends TLS at these addresses

    def __repr__(self) -> str:
        return "PrivateOptions(...)"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PrivateOptions)


def write_private_options(options: PrivateOptions, path: Path) -> None:
    """Write the options to a new file that only this user can read."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    create_private(path, _encoder.encode(options))


def take_private_options(path: Path) -> PrivateOptions:
    """Read the options and delete their file. Raise HubError if they cannot be read."""
    content = read_private(path)
    if content is None:
        raise HubError(f"there is no file {path} with the hub's options", hint=_START_AGAIN)
    try:
        return decode(_decoder, content, f"{path} does not hold a hub's options")
    except ProtocolError as error:
        raise HubError(error.message, hint=_START_AGAIN) from error
    finally:
        path.unlink(missing_ok=True)


_START_AGAIN = "Start the hub with `barnraise hub up` or `barnraise hub follow`."
