"""`barnraise clean` and disk use as they are typed, beside a run that goes on."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hub.process import free_port
from tests.unit.cli.typed import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZE = 3 << 20


@pytest.fixture
def yew() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as room:
        machine = Machine(Path(room), "yew", BARNRAISE_NETWORK_DISCOVERY_PORT=str(free_port()))
        machine.type("up", "--detach")
        try:
            yield machine
        finally:
            machine.type("down")


def start(machine: Machine, name: str, script: str, *options: str) -> str:
    folder = machine.room / "project"
    folder.mkdir(exist_ok=True)
    (folder / "data.bin").write_bytes(bytes(range(256)) * (SIZE // 256))
    (folder / "line.py").write_text(script)
    words = ("--env", "agent", "--per-node", "1", "--name", name, "--folder", str(folder))
    output = machine.type("run", *words, *options, str(folder / "line.py"))
    match = re.search(rf"\b{name}-\w{{4}}\b", output)
    assert match, output
    return match[0]


def test_folder_of_an_ended_run_keeps_only_what_the_script_wrote(yew: Machine) -> None:
    run = start(yew, "first", "open('out', 'w').write('x')")
    folder = yew.state / "runs" / run / "folder"
    deadline = time.monotonic() + 60
    while os.listdir(folder) != ["out"]:
        assert time.monotonic() < deadline, os.listdir(folder)
        time.sleep(0.1)
    again = start(yew, "again", "import os; print(os.path.getsize('data.bin'))")
    assert str(SIZE) in yew.type("logs", again)


def test_clean_removes_ended_runs_and_never_an_active_one(yew: Machine) -> None:
    first = start(yew, "first", "open('out', 'w').write('x')")
    second = start(yew, "second", "print('done')")
    active = start(yew, "active", "import time; time.sleep(300)", "--detach")
    homes = yew.state / "runs"
    try:
        shown = yew.type("clean", "--dry-run")
        assert f"run {first}" in shown
        assert f"{active} (it is active)" in " ".join(shown.split())
        assert set(os.listdir(homes)) == {first, second, active}
        assert "--yes" in yew.type("clean", code=1)
        assert "has not ended" in yew.type("clean", active, "--yes", code=1)
        assert "needs the whole name" in yew.type("clean", first[:4], "--yes", code=1)
        assert set(os.listdir(homes)) == {first, second, active}
        named = yew.type("clean", first, "--yes")
        assert f"run {second}" not in named
        assert re.search(r"Freed \d.* [KM]iB\.", named), named
        assert set(os.listdir(homes)) == {second, active}
        yew.type("clean", "--all", "--yes")
        assert set(os.listdir(homes)) == {active}
        assert (homes / active / "folder" / "data.bin").stat().st_size == SIZE
        assert "There is nothing to remove." in yew.type("clean")
        assert re.search(r"disk: Barnraise uses \d.* MiB \(runs 3\S* MiB", yew.type("status"))
    finally:
        yew.type("stop", active)
