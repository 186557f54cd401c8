"""What a machine is called until somebody renames it."""

from __future__ import annotations

import socket

from barnraise.identity.trust import NAME_LENGTH


def machine_name() -> str:
    """The first part of the host name, as far as it is fit to be shown."""
    name = "".join(letter for letter in socket.gethostname().split(".")[0] if letter.isprintable()).strip()
    return name[:NAME_LENGTH].strip() or "machine"
