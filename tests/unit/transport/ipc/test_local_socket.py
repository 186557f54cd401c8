"""Local socket of the listener."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from barnraise.core.errors import ListenerError
from barnraise.transport.ipc import local_socket
from barnraise.transport.ipc.dial_request import BROKER_NAME
from barnraise.transport.ipc.local_socket import SOCKET_NAME, LocalListener, dial_local


@pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets")
def test_long_socket_path_is_explained(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    for act in (lambda: dial_local(deep, 1), lambda: LocalListener(deep)):
        with pytest.raises(ListenerError, match="may have") as caught:
            act()
        assert "shorter" in caught.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets")
def test_listener_of_other_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = LocalListener(tmp_path)
    assert (tmp_path / "listener.sock").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("barnraise.transport.ipc.local_socket._peer_user", lambda _: 12345)
    with pytest.raises(ListenerError, match="another user"):
        dial_local(tmp_path, 1)
    monkeypatch.undo()
    dial_local(tmp_path, 1)[0].close()
    door.close()
    assert not (tmp_path / "listener.sock").exists()


def test_sockets_in_home_directories_of_macos_have_short_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_socket, "_LONGEST_PATH", 103)
    state = Path("/Users/a-name-of-thirty-two-characters/Library/Application Support/barnraise")
    for name in (SOCKET_NAME, BROKER_NAME):
        local_socket._check_length(state / "ipc" / "012345" / name)
