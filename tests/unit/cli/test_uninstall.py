"""Announcements, refusals and effects of ``barnraise uninstall``; the effects on a real agent."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import psutil
import pytest

from barnraise.cli.uninstall import Removal, check_unused, describe
from barnraise.core.errors import AgentError
from barnraise.core.installation import uninstall_command
from tests.unit.cli.typed import Machine

STATE = Path("/home/ada/.local/state/barnraise")


def test_announcement_names_everything_that_goes_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = describe(
        Removal(
            STATE,
            (STATE / "node.key", STATE / "store"),
            3 << 20,
            strangers=("notes.txt",),
            config=Path("/home/ada/.config/barnraise/config.toml"),
            service="/home/ada/.config/systemd/user/barnraise.service",
            agent=77,
            others=("mac", "nas"),
            hubs=("friends",),
        )
    )
    assert text.splitlines()[:7] == [
        "This will:",
        "  - leave the cluster with mac, nas",
        "  - remove the service /home/ada/.config/systemd/user/barnraise.service",
        "  - stop the agent (pid 77)",
        "  - delete this machine's key, cluster, runs, logs and files in",
        "    /home/ada/.local/state/barnraise (3 MiB)",
        "  - delete the model and the state of the hub friends",
    ]
    assert "notes.txt" in text
    assert "This cannot be undone" in text
    assert max(map(len, text.splitlines())) <= 80


def test_announcement_of_nothing_is_said() -> None:
    assert describe(Removal(STATE, (), 0)) == "Barnraise keeps nothing on this machine."


def test_machine_in_a_run_is_kept_unless_the_person_insists() -> None:
    removal = Removal(STATE, (), 0, active_runs=("train-k3f9",))
    with pytest.raises(AgentError, match="takes part in 1 run: train-k3f9") as caught:
        check_unused(removal, hard=False)
    assert "barnraise stop train-k3f9" in caught.value.hint
    check_unused(removal, hard=True)


@pytest.mark.parametrize(
    "removal", [Removal(STATE, (), 0, listener=7), Removal(STATE, (), 0, active_hubs=("a",))]
)
def test_machine_in_use_without_an_agent_is_kept_always(removal: Removal) -> None:
    with pytest.raises(AgentError):
        check_unused(removal, hard=True)


@pytest.mark.parametrize(
    ("prefix", "has_pip", "command"),
    [
        ("/home/ada/venv", True, "/python -m pip uninstall barnraise"),
        ("/home/ada/venv", False, "uv pip uninstall --python /python barnraise"),
        ("/home/ada/.local/share/pipx/venvs/barnraise", True, "pipx uninstall barnraise"),
        ("/home/ada/.local/share/uv/tools/barnraise", False, "uv tool uninstall barnraise"),
    ],
)
def test_command_that_removes_the_program_fits_the_installation(
    prefix: str, has_pip: bool, command: str
) -> None:
    assert uninstall_command("/python", PurePosixPath(prefix), has_pip=has_pip) == command
    assert uninstall_command("/a b", PurePosixPath("/"), has_pip=True) == '"/a b" -m pip uninstall barnraise'


@pytest.mark.slow
def test_uninstall_of_a_machine_with_an_agent_leaves_only_foreign_files() -> None:
    with tempfile.TemporaryDirectory(prefix="by-") as room:
        machine = Machine(Path(room), "oak", XDG_CONFIG_HOME=f"{room}/config", BARNRAISE_NETWORK_RETRIES="0")
        assert "keeps nothing" in machine.type("uninstall", "--yes")
        assert not machine.state.exists()
        machine.type("up", "--detach")
        try:
            script = machine.room / "uninstall_sleeper.py"
            script.write_text("import time; time.sleep(600)")
            words = (
                *("run", "--env", "agent", "--separate", "--per-node", "1", "--detach"),
                "uninstall_sleeper.py",
            )
            run = machine.type(*words).split()[-1]
            refused = machine.type("uninstall", "--yes", code=1)
            assert f"takes part in 1 run: {run}" in refused
            assert "needs a confirmation" in machine.type("uninstall", "--hard", code=1)
            assert (machine.state / "node.key").exists(), "nothing was deleted without a confirmation"
            (machine.state / "notes.txt").write_text("mine")
            _until(lambda: bool(_workers()), "the worker runs")
            output = machine.type("uninstall", "--yes", "--hard")
        finally:
            machine.type("uninstall", "--yes", "--hard")
        assert "stop the agent (pid " in output
        assert "are not Barnraise's and stay: notes.txt." in " ".join(output.split())
        assert re.fullmatch(r"  .* uninstall .*barnraise", output.splitlines()[-1])
        assert [path.name for path in machine.state.iterdir()] == ["notes.txt"]
        assert (machine.room / "config.toml").exists(), "a file that the person named"
        assert not _workers(), "the worker has ended before its files were deleted"


def _workers() -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if "uninstall_sleeper.py" in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.1)
