"""The test lanes: one rerun, alone, of a failed test that waits; a time limit for a lane that hangs."""

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


class Project:
    """A tiny project with its own lanes."""

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
        code, output = self.call(
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
        return code, output.strip().splitlines()

    def kept(self) -> list[dict[str, str]]:
        file = self.folder / "kept.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


MARKED = "import pytest\n@pytest.mark.clocks\ndef test_it(): late()\n"


@pytest.mark.parametrize(
    "workers", [[], ["-p", "xdist", "-n", "2", "--dist", "loadfile"]], ids=["plain", "xdist"]
)
def test_waiting_tests_that_pass_alone_are_reported_and_kept(project: Project, workers: list[str]) -> None:
    project.write("failure/test_a.py", "def test_it(): late()\ndef test_other(): pass\n")
    project.write("lab/test_b.py", "def test_it(): late(TimeoutError)\n")
    project.write("unit/test_c.py", MARKED.replace("late()", "late(pytest.fail.Exception)"))
    assert project.lane(*workers)[0] == 1
    code, lines = project.judge()
    assert code == 0, lines
    assert lines[-1] == "4 passed, 0 failed"
    names = [f"{name}::test_it" for name in ("failure/test_a.py", "lab/test_b.py", "unit/test_c.py")]
    assert sorted(row["test"] for row in project.kept()) == names
    for name in names:
        assert f"== passed alone, failed beside others: {name}" in lines
    assert all("the machine was late" in row["first"] for row in project.kept())
    assert sum("the machine was late" in line for line in lines) >= 3


def test_timeout_of_a_test_allows_a_rerun(project: Project) -> None:
    text = "import pathlib, time\n@__import__('pytest').mark.timeout(1)\ndef test_it():\n"
    text += "    seen = pathlib.Path(__file__ + '.seen')\n"
    text += "    if not seen.exists():\n        seen.touch()\n        time.sleep(60)\n"
    project.write("lab/test_a.py", text)
    assert project.lane()[0] == 1
    assert project.judge()[0] == 0


def test_waiting_test_that_fails_twice_fails_the_run(project: Project) -> None:
    project.write("lab/test_a.py", "def test_it(): assert 1 == 2\n")
    project.lane()
    code, lines = project.judge()
    assert (code, lines[-1]) == (1, "0 passed, 1 failed")
    assert project.kept() == []


def test_other_failures_are_never_run_again(project: Project) -> None:
    files = {
        "numerics/test_a.py": "def test_it(): late()\n",
        "numerics/test_b.py": MARKED,
        "sim/test_c.py": MARKED,
        "unit/test_d.py": "def test_it(): late()\n",
        "lab/test_e.py": "def test_it(): late(ImportError)\n",
        "lab/test_f.py": "def test_it(): late(ValueError)\n",
    }
    for file, text in files.items():
        project.write(file, text)
    project.lane()
    code, lines = project.judge()
    assert (code, lines[-1]) == (1, "0 passed, 6 failed")
    assert not any("once more" in line for line in lines)
    assert {f"FAILED {file}::test_it" for file in files} <= set(lines)
    for file in files:
        shutil.rmtree((project.folder / file).parent, ignore_errors=True)
    project.write("lab/test_g.py", "import os\ndef test_it(): os._exit(3)\n")
    assert project.lane()[0] == 3
    assert project.judge()[0] == 1


def test_file_that_cannot_be_imported_fails_the_run(project: Project) -> None:
    project.write("lab/test_a.py", "import no_such_module\n")
    project.write("lab/test_b.py", "def test_it(): pass\n")
    project.lane()
    code, lines = project.judge()
    assert code == 1, lines
    assert any("lab/test_a.py" in line for line in lines)


def test_more_than_three_fail_the_run(project: Project) -> None:
    for number in range(4):
        project.write(f"lab/test_{number}.py", f"def test_{number}(): late()\n")
    project.lane()
    code, lines = project.judge()
    assert (code, lines[-1]) == (1, "0 passed, 5 failed")
    assert project.kept() == []


def test_no_lane_and_no_test_are_failures(project: Project) -> None:
    assert project.judge()[0] == 1
    project.lane()
    assert project.judge()[0] == 1


@pytest.mark.slow
@pytest.mark.clocks
@pytest.mark.skipif(sys.platform == "win32", reason="stacks are asked for by a signal")
@pytest.mark.parametrize("case", ["a test hangs in a worker of xdist", "a thread stays behind"])
def test_lane_that_does_not_end_is_killed_with_all_stacks(project: Project, case: str) -> None:
    text = "import threading, time\ndef forgotten():\n    time.sleep(150)\n"
    if case == "a thread stays behind":
        project.write("unit/test_a.py", text + "def test_it(): threading.Thread(target=forgotten).start()\n")
        code, output = project.lane(limit=20.0)
        assert "[100%]" in output, "the test itself had passed"
    else:
        project.write("unit/test_a.py", text + "def test_it(): forgotten()\n")
        code, output = project.lane("-p", "xdist", "-n", "1", limit=20.0)
    assert code == 124
    assert "in forgotten" in output, output
    assert project.judge()[0] == 1
