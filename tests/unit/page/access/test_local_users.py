"""The user behind a loopback connection, in Linux's table and on a real connection."""

from __future__ import annotations

import os
import platform
import socket
import sys
from pathlib import Path

import pytest

from barnraise.page.access import local_users
from barnraise.page.access.local_users import find_user, is_of_other_user

TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 2 1 0 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 3 1 0 20 4 30 10 -1
   3: garbage
   4: 0100007F:C351 0100007F:1F90 05 00000000:00000000 00:00000000 00000000  1001        0 4 1 0 20 4 30 10 -1
   5: 0100007F:C352 0100007F:1F90 06 00000000:00000000 03:000015A6 00000000     0        0 0 3 0
"""
TABLE_6 = TABLE.replace("0100007F:", "0000000000000000FFFF00000100007F:").replace("C350", "C353")
HEADER = TABLE.splitlines()[0]


@pytest.mark.skipif(sys.byteorder != "little", reason="the table was recorded on a little-endian machine")
def test_user_of_the_other_end_is_found() -> None:
    lines = TABLE.splitlines()
    assert find_user(lines, ("127.0.0.1", 50000), ("127.0.0.1", 8080)) == 1001
    assert find_user(lines, ("127.0.0.1", 8080), ("127.0.0.1", 50000)) == 1000
    assert find_user(lines, ("127.0.0.1", 1), ("127.0.0.1", 8080)) is None
    assert find_user(lines, ("127.0.0.1", 50001), ("127.0.0.1", 8080)) == 1001, "it will write no more"
    assert find_user(lines, ("127.0.0.1", 50002), ("127.0.0.1", 8080)) is None, "its program has closed it"
    assert find_user([*lines, *TABLE_6.splitlines()], ("127.0.0.1", 50003), ("127.0.0.1", 8080)) == 1001


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the table")
def test_own_connection_is_found_and_not_of_another() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        source, target = client.getsockname(), server.getsockname()
        with open("/proc/net/tcp", encoding="ascii") as table:
            assert find_user(table, source, target) == os.geteuid()
        assert not is_of_other_user(source, target)
        client.shutdown(socket.SHUT_WR)
        assert not is_of_other_user(source, target)
        client.close()
        assert is_of_other_user(source, target) != local_users._may_come_from_windows()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the table")
@pytest.mark.skipif(not os.path.exists("/proc/net/tcp6"), reason="this machine has no IPv6")
def test_own_connection_by_a_socket_of_ipv6_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET6) as client,
    ):
        client.connect(("::ffff:127.0.0.1", server.getsockname()[1]))
        source, target = ("127.0.0.1", client.getsockname()[1]), server.getsockname()
        user = os.geteuid()
        with open("/proc/net/tcp6", encoding="ascii") as table:
            assert find_user(table, source, target) == user
        assert not is_of_other_user(source, target)
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert is_of_other_user(source, target) == (user != 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the table")
@pytest.mark.parametrize(
    ("tables", "release", "is_other"),
    [
        (("tcp", "tcp6"), "6.8.0", True),
        (("tcp",), "6.8.0", True),
        ((), "6.8.0", False),
        (("tcp", "tcp6"), "5.15.153.1-microsoft-standard-WSL2", False),
    ],
)
def test_connection_in_no_table_is_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: tuple[str, ...], release: str, is_other: bool
) -> None:
    for name in tables:
        (tmp_path / name).write_text(f"{HEADER}\n")
    monkeypatch.setattr(local_users, "_TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
    monkeypatch.setattr(platform, "release", lambda: release)
    assert is_of_other_user(("127.0.0.1", 50000), ("127.0.0.1", 8080)) == is_other
