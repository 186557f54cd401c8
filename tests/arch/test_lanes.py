"""The checks believe a failure: one rerun, alone, of what waits; a limit for what hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source_tree import ROOT

ONCE = """
import pathlib
def late(error=AssertionError):
    seen = pathlib.Path(__file__ + ".seen")
    if not seen.exists():
        seen.touch()
        raise error("the machine was late")
"""


class Room:
    """A tiny project with lanes of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    clocks\n    lab\n")

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(ONCE + text)

    def call(self, *words: str) -> tuple[int, str]:
        # Without other plugins, for speed.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "tests.lanes", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=200
        )
        return done.returncode, done.stdout + done.stderr

    def lane(self, *words: str, limit: float = 100.0) -> tuple[int, str]:
        plain = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", *words]
        return self.call("run", "--name", "one", "--limit", str(limit), "--into", "records", "--", *plain)

    def judge(self) -> tuple[int, list[str]]:
        code, said = self.call(
            "judge",
            "--lane",
            "one",
            "--into",
            "records",
            "--keep",
            "kept.jsonl",
            "--",
            "-q",
            "-p",
            "pytest_timeout",
        )
        return code, said.strip().splitlines()

    def kept(self) -> list[dict[str, str]]:
        file = self.folder / "kept.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


MARKED = "import pytest\n@pytest.mark.clocks\ndef test_it(): late()\n"


@pytest.mark.parametrize(
    "workers", [[], ["-p", "xdist", "-n", "2", "--dist", "loadfile"]], ids=["plain", "xdist"]
)
def test_waiting_tests_that_pass_alone_are_reported_and_kept(room: Room, workers: list[str]) -> None:
    room.write("failure/test_a.py", "def test_it(): late()\ndef test_other(): pass\n")
    room.write("lab/test_b.py", "def test_it(): late(TimeoutError)\n")
    room.write("unit/test_c.py", MARKED.replace("late()", "late(pytest.fail.Exception)"))
    assert room.lane(*workers)[0] == 1
    code, said = room.judge()
    assert code == 0, said
    assert said[-1] == "4 passed, 0 failed"
    names = [f"{name}::test_it" for name in ("failure/test_a.py", "lab/test_b.py", "unit/test_c.py")]
    assert sorted(row["test"] for row in room.kept()) == names
    for name in names:
        assert f"== passed alone, failed beside others: {name}" in said
    assert all("the machine was late" in row["first"] for row in room.kept())
    assert sum("the machine was late" in line for line in said) >= 3


def test_timeout_of_a_test_allows_a_rerun(room: Room) -> None:
    text = "import pathlib, time\n@__import__('pytest').mark.timeout(1)\ndef test_it():\n"
    text += "    seen = pathlib.Path(__file__ + '.seen')\n"
    text += "    if not seen.exists():\n        seen.touch()\n        time.sleep(60)\n"
    room.write("lab/test_a.py", text)
    assert room.lane()[0] == 1
    assert room.judge()[0] == 0


def test_waiting_test_that_fails_twice_fails_the_run(room: Room) -> None:
    room.write("lab/test_a.py", "def test_it(): assert 1 == 2\n")
    room.lane()
    code, said = room.judge()
    assert (code, said[-1]) == (1, "0 passed, 1 failed")
    assert room.kept() == []


def test_other_failures_are_never_run_again(room: Room) -> None:
    files = {
        "numerics/test_a.py": "def test_it(): late()\n",
        "numerics/test_b.py": MARKED,
        "sim/test_c.py": MARKED,
        "unit/test_d.py": "def test_it(): late()\n",
        "lab/test_e.py": "def test_it(): late(ImportError)\n",
        "lab/test_f.py": "def test_it(): late(ValueError)\n",
    }
    for file, text in files.items():
        room.write(file, text)
    room.lane()
    code, said = room.judge()
    assert (code, said[-1]) == (1, "0 passed, 6 failed")
    assert not any("once more" in line for line in said)
    assert {f"FAILED {file}::test_it" for file in files} <= set(said)
    for file in files:
        shutil.rmtree((room.folder / file).parent, ignore_errors=True)
    room.write("lab/test_g.py", "import os\ndef test_it(): os._exit(3)\n")
    assert room.lane()[0] == 3
    assert room.judge()[0] == 1


def test_file_that_cannot_be_imported_fails_the_run(room: Room) -> None:
    room.write("lab/test_a.py", "import no_such_module\n")
    room.write("lab/test_b.py", "def test_it(): pass\n")
    room.lane()
    code, said = room.judge()
    assert code == 1, said
    assert any("lab/test_a.py" in line for line in said)


def test_more_than_three_fail_the_run(room: Room) -> None:
    for number in range(4):
        room.write(f"lab/test_{number}.py", f"def test_{number}(): late()\n")
    room.lane()
    code, said = room.judge()
    assert (code, said[-1]) == (1, "0 passed, 5 failed")
    assert room.kept() == []


def test_no_lane_and_no_test_are_failures(room: Room) -> None:
    assert room.judge()[0] == 1
    room.lane()
    assert room.judge()[0] == 1


@pytest.mark.slow
@pytest.mark.clocks
@pytest.mark.skipif(sys.platform == "win32", reason="stacks are asked for by a signal")
@pytest.mark.parametrize("case", ["a test hangs in a worker of xdist", "a thread stays behind"])
def test_lane_that_does_not_end_is_killed_with_all_stacks(room: Room, case: str) -> None:
    text = "import threading, time\ndef forgotten():\n    time.sleep(150)\n"
    if case == "a thread stays behind":
        room.write("unit/test_a.py", text + "def test_it(): threading.Thread(target=forgotten).start()\n")
        code, said = room.lane(limit=20.0)
        assert "[100%]" in said, "the test itself had passed"
    else:
        room.write("unit/test_a.py", text + "def test_it(): forgotten()\n")
        code, said = room.lane("-p", "xdist", "-n", "1", limit=20.0)
    assert code == 124
    assert "in forgotten" in said, said
    assert room.judge()[0] == 1
