"""Output of a worker: how many calls of the system write one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.repository import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a socket as standard output is Unix's")

_PROGRAM = """
import sys
from barnraise.core.logs.whole_lines import write_whole_lines
if sys.argv[1] == "whole":
    write_whole_lines()
for number in range(50):
    print("final", number, "layers.0.weight", number / 7)
print("the last words", end="")
"""


@pytest.mark.parametrize("way", ["whole", "as Python does"])
def test_each_line_is_one_write(way: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps the borders of writes
    near.settimeout(60)
    with near, subprocess.Popen([sys.executable, "-c", _PROGRAM, way], env=environment, stdout=far) as done:
        far.close()
        writes = [near.recv(4096).decode()]
        while not writes[-1].endswith("words"):
            writes.append(near.recv(4096).decode())
        assert done.wait(60) == 0
    lines = [write for write in writes if write.endswith("\n") and len(write.split()) == 4]
    if way == "whole":
        assert len(lines) == 50
        assert writes[50:] == ["the last words"]
    else:
        assert not lines, "else this test shows nothing"
