"""Orphan processes and out-of-memory kills on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from barnraise.agent.supervisor import linux
from tests.repository import ROOT


def test_memory_kills_parses_vmstat(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert linux.memory_kills(vmstat) is None
    vmstat.write_text("pgfault 5\noom_kill 3\noom_kill_other 9\n")
    assert linux.memory_kills(vmstat) == 3
    vmstat.write_text("pgfault 5\n")
    assert linux.memory_kills(vmstat) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")
def test_reap_orphans_leaves_own_children_alone() -> None:
    program = """
import os, subprocess, sys, time
from barnraise.agent.supervisor import linux
linux.adopt_orphans()
own = subprocess.Popen(["sleep", "600"])
parent = subprocess.Popen(["sh", "-c", "sleep 0.1 & echo $!"], stdout=subprocess.PIPE)
orphan = int(parent.communicate()[0])
stat = f"/proc/{orphan}/stat"
while open(stat).read().split()[2] != "Z":
    time.sleep(0.01)
assert int(open(stat).read().split()[3]) == os.getpid()
linux.reap_orphans([own.pid])
assert not os.path.exists(stat)
own.kill()
while open(f"/proc/{own.pid}/stat").read().split()[2] != "Z":
    time.sleep(0.01)
linux.reap_orphans([own.pid])
assert own.wait() == -9
subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"])
assert linux.kill_descendants(60)
assert linux._descendants(os.getpid()) == []
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=environment, timeout=120)
