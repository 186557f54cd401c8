"""Local socket of the listener, for processes of the same user on the same machine.

Unix: a socket file for the owner alone, and both sides check the other's user. Python on Windows has no such
sockets. There it is a loopback port, and a token in a private file proves the user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
from pathlib import Path

from barnraise.core.errors import ListenerError
from barnraise.core.ownership.check import home_directory
from barnraise.identity.private_file import create_private, read_private

SOCKET_NAME = "listener.sock"
TOKEN_NAME = "listener.token"
_LONGEST_PATH = 107 if sys.platform == "linux" else 103
_BACKLOG = 256


class LocalListener:
    """Listener's side of the socket. The caller ensures that there is one per directory."""

    def __init__(self, directory: Path) -> None:
        self.token = ""
        if sys.platform != "win32":
            self._file = directory / SOCKET_NAME
            self._file.unlink(missing_ok=True)
            self.socket = bind_unix(self._file)
        else:
            self._file = directory / TOKEN_NAME
            self._file.unlink(missing_ok=True)
            self.socket = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
            self.token = secrets.token_hex(32)
            create_private(self._file, f"{self.socket.getsockname()[1]} {self.token}".encode())
        self.socket.setblocking(False)

    def close(self) -> None:
        # The name first: a process that finds no name starts a new listener instead of waiting for this one.
        with contextlib.suppress(OSError):
            self._file.unlink()
        self.socket.close()


def dial_local(directory: Path, timeout_s: float) -> tuple[socket.socket, str]:
    """Connect to this machine's listener and return the token to show; raise ListenerError if none
    answers.
    """
    try:
        if sys.platform != "win32":
            connection, token = dial_unix(directory / SOCKET_NAME, timeout_s), ""
        else:
            connection, token = _dial_loopback(directory / TOKEN_NAME, timeout_s)
    except OSError as error:
        raise ListenerError(f"no listener answers at {directory}: {error}") from error
    if not is_same_user(connection):
        connection.close()
        raise ListenerError(
            f"the listener at {directory} belongs to another user",
            hint="Give every user a state directory of their own (BARNRAISE_STATE_DIRECTORY).",
        )
    return connection, token


def is_same_user(connection: socket.socket) -> bool:
    """Return True if the other process is of this user or root; on Windows the token proves it."""
    if sys.platform == "win32":
        return True
    else:
        try:
            return _peer_user(connection) in (os.geteuid(), 0)
        except OSError:
            return False


if sys.platform != "win32":

    def _peer_user(connection: socket.socket) -> int:
        user: int
        if sys.platform == "linux":
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            _, user, _ = struct.unpack("3i", credentials)
        else:
            # LOCAL_PEERCRED of macOS and the BSDs: struct xucred begins with its version and the user.
            _, user = struct.unpack_from("=II", connection.getsockopt(0, 1, 76))
        return user

    def bind_unix(path: Path) -> socket.socket:
        """Listen at a socket file that only this user can open; raise ListenerError if that fails."""
        _check_length(path)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            door.bind(str(path))
            path.chmod(0o600)
            door.listen(_BACKLOG)
        except OSError as error:
            door.close()
            raise ListenerError(
                f"the local socket {path} cannot be made: {error.strerror}",
                hint="Choose a state directory on a local disk that only you may write to.",
            ) from error
        return door

    def dial_unix(path: Path, timeout_s: float) -> socket.socket:
        """Connect to a socket file; raise OSError if nothing listens there."""
        _check_length(path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return connection


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise ListenerError(
            f"the path {path} has {length} bytes; a local socket's path may have {_LONGEST_PATH}",
            hint=f"Choose a shorter state directory inside {home_directory()}, which only you may write to "
            "(BARNRAISE_STATE_DIRECTORY).",
        )


def _dial_loopback(path: Path, timeout_s: float) -> tuple[socket.socket, str]:
    content = read_private(path)
    if content is None:
        raise FileNotFoundError(f"{path} does not exist")
    port, _, token = content.decode("ascii", "replace").partition(" ")
    if not port.isascii() or not port.isdigit():
        raise ListenerError(f"{path} cannot be read", hint="Delete it and start the listener again.")
    return socket.create_connection(("127.0.0.1", int(port)), timeout=timeout_s), token
