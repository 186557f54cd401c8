"""Names that the Tab key completes, with a real agent, without one, and with one that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from barnraise.cli.completion import DEADLINE_S
from barnraise.cli.main import app
from tests.unit.cli.typed import Machine


def complete(*words: str) -> list[str]:
    """Return what the Tab key offers for the last word, by click's own machinery."""
    shell = BashComplete(app, {}, "barnraise", "_BARNRAISE_COMPLETE")
    return [str(item.value) for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as room:
        machine = Machine(Path(room), "oak")
        machine.type("up", "--detach")
        try:
            machine.type("rename", "oak")
            (machine.room / "line.py").write_text("print(1)")
            machine.type("run", "--env", "agent", "--per-node", "1", "--name", "spiral", "line.py")
            yield machine
        finally:
            machine.type("down")


@pytest.fixture
def here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name, value in machine.environment.items():
        if name.startswith("BARNRAISE_"):
            monkeypatch.setenv(name, value)
    return machine


@pytest.fixture
def no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_machines_are_completed() -> None:
    for words in (
        ("run", "--on"),
        ("plan", "--on"),
        ("resume", "--on"),
        ("unpair",),
        ("continue", "--without"),
    ):
        assert complete(*words, "") == ["oak"], words
        assert complete(*words, "O") == ["oak"], words
        assert complete(*words, "p") == [], words
    assert complete("run", "--on", "ash,o") == ["ash,oak"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_runs_are_completed_where_they_fit() -> None:
    (name,) = complete("logs", "")
    assert name.startswith("spiral-")
    for command in ("ps", "attach", "resume", "export"):
        assert complete(command, "spi") == [name], command
    assert complete("stop", "") == [], "it has ended"
    assert complete("logs", "x") == []


@pytest.mark.slow
def test_shell_gets_names_without_any_other_output(machine: Machine) -> None:
    script = "import sys; sys.argv = ['barnraise']; from barnraise.cli.main import main; main()"
    variables = {
        "_BARNRAISE_COMPLETE": "bash_complete",
        "COMP_WORDS": "barnraise run --on o",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=machine.environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("plain,oak\n", "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes cannot be stopped there")
def test_agent_that_hangs_delays_the_shell_by_the_deadline_only(
    here: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert complete("unpair", "") == ["oak"]
    pid = json.loads(here.type("status", "--json"))["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert complete("unpair", "") == []
        assert time.monotonic() - began < DEADLINE_S + 1.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("words", [("run", "--on", ""), ("logs", ""), ("stop", "s")])
def test_without_an_agent_nothing_is_offered_or_made(
    no_agent: Path, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert complete(*words) == []
    assert not no_agent.exists()
    assert capfd.readouterr() == ("", "")


def test_wrong_settings_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_NETWORK_PORT", "many")
    assert complete("unpair", "") == []


@pytest.mark.usefixtures("no_agent")
def test_codes_and_commands_are_completed_without_an_agent() -> None:
    assert complete("explain", "pai") == ["pairing"]
    assert complete("explain", "hub") == ["hub-away", "hub-refused", "hub"]
    assert complete("help", "unp") == ["unpair"]
    assert "unpair" in complete("u")


@pytest.mark.usefixtures("no_agent")
def test_scripts_are_completed_by_the_shell() -> None:
    shell = BashComplete(app, {}, "barnraise", "_BARNRAISE_COMPLETE")
    for words in (["run"], ["run", "train.py"], ["hub", "up"]):
        assert [(item.type, item.value) for item in shell.get_completions(words, "tr")] == [("file", "tr")]
