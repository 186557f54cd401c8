"""The user behind a loopback connection, in Linux's table and on a real connection."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from barnraise.page.access.local_users import find_user, is_of_other_user

TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 2 1 0 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 3 1 0 20 4 30 10 -1
   3: garbage
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the table was recorded on a little-endian machine")
def test_user_of_the_other_end_is_found() -> None:
    lines = TABLE.splitlines()
    assert find_user(lines, ("127.0.0.1", 50000), ("127.0.0.1", 8080)) == 1001
    assert find_user(lines, ("127.0.0.1", 8080), ("127.0.0.1", 50000)) == 1000
    assert find_user(lines, ("127.0.0.1", 1), ("127.0.0.1", 8080)) is None


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
