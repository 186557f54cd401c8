"""Binding of the port: one that the system reserves is passed over, as one that another program has."""

from __future__ import annotations

import errno
import socket

import pytest

from barnraise.core.errors import ListenerError
from barnraise.transport.listener.bind import open_port

PORT = 52416


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system deny the access to one port, as Windows does for ranges that it reserves."""
    bind = socket.socket.bind

    def bind_unless_reserved(door: socket.socket, address: tuple[str, int]) -> None:
        if address[1] == PORT:
            raise OSError(errno.EACCES, "access is denied")
        bind(door, address)

    monkeypatch.setattr(socket.socket, "bind", bind_unless_reserved, raising=False)


@pytest.mark.usefixtures("reserved")
def test_reserved_port_is_replaced_by_another() -> None:
    with open_port(PORT, any_port=True) as door:
        assert door.getsockname()[1] not in (0, PORT)


@pytest.mark.usefixtures("reserved")
def test_reserved_port_is_an_error_if_no_other_will_do() -> None:
    with pytest.raises(ListenerError, match="port 52416 cannot be opened"):
        open_port(PORT, any_port=False)
