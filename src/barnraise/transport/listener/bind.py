"""Binding of the one TCP port of a machine."""

from __future__ import annotations

import errno
import logging
import socket
import sys

from barnraise.core.errors import ListenerError

_BACKLOG = 512
# Windows reserves ranges of ports, and says for these that access is denied.
_TAKEN = (errno.EADDRINUSE, errno.EACCES)

_log = logging.getLogger(__name__)


def open_port(port: int, *, any_port: bool) -> socket.socket:
    """Return a non-blocking listening socket. ``any_port``: use another port if this one is taken."""
    try:
        return _bind(port)
    except OSError as error:
        if not any_port or error.errno not in _TAKEN:
            raise ListenerError(
                f"port {port} cannot be opened: {error.strerror}",
                hint="Stop the program that has it, or choose another port (BARNRAISE_NETWORK_PORT).",
            ) from error
    door = _bind(0)
    _log.warning("port %d is taken; listening on port %d instead", port, door.getsockname()[1])
    return door


def _bind(port: int) -> socket.socket:
    """Bind IPv6 and IPv4 with one socket, or IPv4 alone where there is no IPv6."""
    try:
        return _bind_family(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno in _TAKEN:
            raise
    return _bind_family(socket.AF_INET, "0.0.0.0", port)


def _bind_family(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":
            door.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        door.bind((host, port))
        door.listen(_BACKLOG)
    except OSError:
        door.close()
        raise
    door.setblocking(False)
    return door
