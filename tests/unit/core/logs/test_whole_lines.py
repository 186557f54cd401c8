"""Output of a worker, while something else writes to the same pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.repository import ROOT

_PROGRAM = """
import os, sys, threading
from barnraise.core.logs.whole_lines import write_whole_lines
if sys.argv[1] == "whole":
    write_whole_lines()
def log():
    for _ in range(2000):
        os.write(1, b"barnraise: a line of the log\\n")
thread = threading.Thread(target=log)
thread.start()
for number in range(2000):
    print("final", number, "layers.0.weight", number / 7)
thread.join()
print("the last words", end="")
"""


@pytest.mark.parametrize("way", ["whole", "as Python does"])
def test_lines_of_script_and_log_do_not_mix(way: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, way], env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    whole = [line for line in lines if line.startswith("final ") and len(line.split()) == 4]
    if way == "whole":
        assert len(whole) == 2000
        assert lines[-1] == "the last words"
    else:
        assert len(whole) < 2000, "else this test shows nothing"
