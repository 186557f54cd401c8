"""The files that start the agent, byte for byte, and what is done to the system to install them.

Nothing here touches the real system: commands go to a stand-in, files to a temporary home.
"""

from __future__ import annotations

import json
import plistlib
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from barnraise.cli.main import main
from barnraise.cli.services import (
    ServiceLaunch,
    ServiceManager,
    launchd,
    restart_loop,
    service,
    systemd,
    windows,
)
from barnraise.cli.services.launchd import Launchd
from barnraise.cli.services.systemd import Systemd
from barnraise.cli.services.windows import LogonTask
from barnraise.core.command import NOT_FOUND, TOO_SLOW, runner
from barnraise.core.errors import AgentError
from barnraise.transport.ipc.messages import ListenerStanding

GOLDEN = Path(__file__).parent / "golden"
UNIX = ServiceLaunch(
    python="/home/anna/my tools/bin/python",
    directory="/home/anna",
    log="/home/anna/.local/state/barnraise/agent.log",
    environment=(("BARNRAISE_NETWORK_PEERS", 'a,"b" 100%'), ("BARNRAISE_NETWORK_PORT", "6000")),
)
WINDOWS = ServiceLaunch(
    python=r"C:\Users\anna b\venv\Scripts\python.exe",
    directory=r"C:\Users\anna b",
    log=r"C:\Users\anna b\AppData\Local\barnraise\agent.log",
    environment=(("BARNRAISE_NETWORK_PEERS", "a & b"), ("BARNRAISE_NETWORK_PORT", "6000")),
)


class System:
    """Answers commands by how they begin; everything else succeeds without a word."""

    def __init__(self, **answers: tuple[int, str]) -> None:
        self.answers = {key.replace("_", "-"): answer for key, answer in answers.items()}
        self.ran: list[str] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.ran.append(shlex.join(command))
        for word, (code, text) in self.answers.items():
            if word in [part.lstrip("/-").lower() for part in command]:
                return subprocess.CompletedProcess(list(command), code, text, text if code else "")
        return subprocess.CompletedProcess(list(command), 0, "", "")


LIVELY = {"is_system_running": (1, "degraded\n"), "show_user": (0, "Linger=no\n")}


def linux(home: Path, **answers: tuple[int, str]) -> tuple[Systemd, System]:
    system = System(**{**LIVELY, **answers})
    return Systemd(system, home, "anna"), system


def check_golden(name: str, content: bytes) -> None:
    assert content == (GOLDEN / name).read_bytes(), f"{name} is not as it was agreed on"


# the files


def test_systemd_unit_matches_golden_file() -> None:
    check_golden("barnraise.service", systemd.render(UNIX).encode())


def test_launchd_property_list_matches_golden_file() -> None:
    content = launchd.render(UNIX)
    check_golden("barnraise.agent.plist", content)
    read = plistlib.loads(content)
    assert read["ProgramArguments"] == [UNIX.python, "-P", "-m", "barnraise.agent"]
    assert read["EnvironmentVariables"] == dict(UNIX.environment)
    assert read["KeepAlive"] == {"SuccessfulExit": False}


def test_windows_task_matches_golden_file() -> None:
    text = windows.render(WINDOWS, r"HOME\anna")
    check_golden("barnraise-task.xml", text.encode())
    names = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    root = ElementTree.fromstring(text.encode("utf-16"))
    assert root.findtext(".//t:LogonTrigger/t:UserId", namespaces=names) == r"HOME\anna"
    assert root.findtext(".//t:RestartOnFailure/t:Interval", namespaces=names) == "PT1M"
    command = root.findtext(".//t:Command", namespaces=names)
    assert command == r"C:\Users\anna b\venv\Scripts\pythonw.exe"
    arguments = root.findtext(".//t:Arguments", namespaces=names) or ""
    assert arguments.endswith('--set "BARNRAISE_NETWORK_PEERS=a & b" --set BARNRAISE_NETWORK_PORT=6000')


@pytest.mark.skipif(sys.platform != "linux", reason="needs systemd's own checker")
def test_systemd_itself_accepts_the_unit(tmp_path: Path) -> None:
    done = runner(10.0)(["systemd-analyze", "--version"])
    if done.returncode != 0:
        pytest.skip("systemd-analyze is not here")
    launch = ServiceLaunch(sys.executable, str(tmp_path), "", UNIX.environment)
    unit = tmp_path / "barnraise.service"
    unit.write_text(systemd.render(launch), encoding="utf-8")
    done = runner(10.0)(["systemd-analyze", "--user", "verify", "--man=no", str(unit)])
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "barnraise.service" in line]
    assert [line for line in ours if "RestartSteps" not in line and "RestartMaxDelaySec" not in line] == []


# what is done


def test_systemd_is_installed_shown_and_removed(tmp_path: Path) -> None:
    manager, system = linux(tmp_path, is_active=(0, "active\n"), is_enabled=(0, "enabled\n"))
    assert not manager.status().installed
    installed = manager.install(UNIX)
    file = tmp_path / "systemd" / "user" / "barnraise.service"
    assert file.read_text() == systemd.render(UNIX)
    assert installed.wrote == (str(file),)
    assert installed.ran == (
        "systemctl --user daemon-reload",
        "systemctl --user enable --now barnraise.service",
    )
    assert installed.undo == "barnraise service remove"
    assert "loginctl enable-linger anna" in installed.hints[0]
    assert not any("enable-linger" in command for command in system.ran), "offered, never run silently"
    shown = manager.status()
    assert shown.installed
    assert shown.running
    removed = manager.remove()
    assert not file.exists()
    assert removed.deleted == (str(file),)
    assert removed.ran == (
        "systemctl --user disable --now barnraise.service",
        "systemctl --user daemon-reload",
    )
    assert not manager.status().installed


def test_no_word_of_linger_where_it_is_on(tmp_path: Path) -> None:
    manager, _ = linux(tmp_path, show_user=(0, "Linger=yes\n"))
    assert manager.install(UNIX).hints == ()


def test_failed_service_is_installed_but_not_running(tmp_path: Path) -> None:
    manager, _ = linux(tmp_path, is_active=(3, "failed\n"), is_enabled=(0, "enabled\n"))
    manager.install(UNIX)
    status = manager.status()
    assert status.installed
    assert not status.running
    assert "failed" in status.sentence
    assert "journalctl" in status.hints[0]


@pytest.mark.parametrize(
    ("code", "text", "words"),
    [
        (NOT_FOUND, "", "systemd is not on this machine"),
        (1, "offline\n", "does not answer (offline)"),
        (1, "Failed to connect to bus: No medium found\n", "No medium found"),
    ],
)
def test_without_systemd_there_is_another_way(tmp_path: Path, code: int, text: str, words: str) -> None:
    manager, system = linux(tmp_path, is_system_running=(code, text))
    with pytest.raises(AgentError) as caught:
        manager.install(UNIX)
    assert words in caught.value.message
    assert "barnraise up --detach" in caught.value.hint
    assert list(tmp_path.rglob("*.service")) == []
    assert system.ran == ["systemctl --user is-system-running"]


def test_failed_installation_leaves_nothing_behind(tmp_path: Path) -> None:
    manager, _ = linux(tmp_path, enable=(1, "Unit is masked.\n"))
    with pytest.raises(AgentError, match="Unit is masked"):
        manager.install(UNIX)
    assert list(tmp_path.rglob("*.service")) == []


def managers(home: Path) -> list[tuple[ServiceManager, ServiceLaunch]]:
    unknown_once = System(query=(1, "ERROR"))
    return [
        (linux(home)[0], UNIX),
        (Launchd(System(), home, 501), UNIX),
        (LogonTask(unknown_once, home, r"HOME\anna", "python"), WINDOWS),
    ]


@pytest.mark.parametrize("which", range(3))
def test_twice_is_refused_with_a_clear_word(tmp_path: Path, which: int) -> None:
    manager, launch = managers(tmp_path)[which]
    with pytest.raises(AgentError, match="is not installed"):
        manager.remove()
    manager.install(launch)
    with pytest.raises(AgentError, match="installed already") as caught:
        manager.install(launch)
    assert "barnraise service remove" in caught.value.hint


def test_launchd_is_installed_shown_and_removed(tmp_path: Path) -> None:
    printed = "gui/501/barnraise.agent = {\n\tactive count = 1\n\tstate = running\n\n\tprogram = x\n}\n"
    system = System(print=(0, printed))
    manager = Launchd(system, tmp_path, 501)
    installed = manager.install(UNIX)
    file = tmp_path / "Library" / "LaunchAgents" / "barnraise.agent.plist"
    assert file.read_bytes() == launchd.render(UNIX)
    assert installed.ran == (
        "launchctl enable gui/501/barnraise.agent",
        f"launchctl bootstrap gui/501 {file}",
    )
    assert "Local Network" in installed.hints[0]
    assert manager.status().running
    system.answers["print"] = (0, printed.replace("running", "not running"))
    assert not manager.status().running
    system.answers["print"] = (113, "Could not find service")
    assert f"launchctl bootstrap gui/501 {file}" in manager.status().hints[0]
    assert manager.remove().ran == ("launchctl bootout gui/501/barnraise.agent",)
    assert not file.exists()


def test_launchd_without_a_session_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    manager = Launchd(System(bootstrap=(125, "Domain does not support specified action")), tmp_path, 501)
    with pytest.raises(AgentError, match="Domain does not support") as caught:
        manager.install(UNIX)
    assert "ssh" in caught.value.hint
    assert list(tmp_path.rglob("*.plist")) == []


def test_windows_task_is_installed_shown_and_removed(tmp_path: Path) -> None:
    system = System(query=(1, "ERROR"), powershell=(0, "4\r\n"))
    manager = LogonTask(system, tmp_path, r"HOME\anna", "python.exe")
    assert not manager.status().installed
    installed = manager.install(WINDOWS)
    file = tmp_path / "barnraise-task.xml"
    text = file.read_bytes().decode("utf-16").replace("\r\n", "\n")
    assert text == windows.render(WINDOWS, r"HOME\anna")
    assert [command.split()[:2] for command in installed.ran] == [
        ["schtasks", "/Create"],
        ["schtasks", "/Run"],
    ]
    system.answers["query"] = (0, "")
    assert manager.status().running
    system.answers["powershell"] = (0, "3\r\n")
    assert not manager.status().running
    removed = manager.remove()
    assert removed.ran[0] == "python.exe -P -m barnraise.cli.main down", "goodbye before the end by force"
    assert removed.ran[1:] == (
        "schtasks /End /TN 'Barnraise agent'",
        "schtasks /Delete /TN 'Barnraise agent' /F",
    )
    assert not file.exists()


def test_denied_windows_task_leaves_nothing_behind(tmp_path: Path) -> None:
    system = System(query=(1, ""), create=(1, "ERROR: Access is denied."))
    with pytest.raises(AgentError, match="Access is denied") as caught:
        LogonTask(system, tmp_path, r"HOME\anna", "python").install(WINDOWS)
    assert "administrator" in caught.value.hint
    assert not (tmp_path / "barnraise-task.xml").exists()


# what a service may know


def test_only_our_settings_are_kept_and_paths_become_whole(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin",
        "PYTHONPATH": "src",
        "BARNRAISE_NETWORK_PORT": "6000",
        "BARNRAISE_STATE_DIRECTORY": "state",
        "BARNRAISE_CONFIG": str(tmp_path / "c.toml"),
        "BARNRAISE_TEST_TOKEN": "of another program",
    }
    assert service.kept_environment(environ, tmp_path) == (
        ("BARNRAISE_CONFIG", str(tmp_path / "c.toml")),
        ("BARNRAISE_NETWORK_PORT", "6000"),
        ("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state")),
    )


def test_agent_that_needs_shell_variables_is_rejected() -> None:
    service.check_importable(System(), "python")
    with pytest.raises(AgentError, match="cannot import"):
        service.check_importable(System(e=(1, "ModuleNotFoundError")), "python")


@pytest.mark.parametrize(
    ("platform", "kind"), [("linux", Systemd), ("darwin", Launchd), ("win32", LogonTask)]
)
def test_each_system_has_its_way(platform: str, kind: type, tmp_path: Path) -> None:
    assert isinstance(service.manager_here(System(), tmp_path, platform), kind)


def test_other_systems_have_none(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="freebsd14"):
        service.manager_here(System(), tmp_path, "freebsd14")


# the commands


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> System:
    """A home without an agent, on a Linux whose commands are made up."""
    system = System(**LIVELY, is_active=(0, "active\n"), is_enabled=(0, "enabled\n"))
    monkeypatch.setattr(service, "runner", lambda _: system)
    monkeypatch.setattr(service, "manager_here", lambda run, state: Systemd(run, tmp_path, "anna"))
    monkeypatch.setattr(service, "standing_of", lambda _: None)
    return system


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["barnraise", "service", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_service_commands_report_exactly_what_they_did(
    system: System, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(monkeypatch, "status") == 3
    assert "not installed" in capsys.readouterr().out
    assert command(monkeypatch, "install") == 0
    out = capsys.readouterr().out
    file = tmp_path / "systemd" / "user" / "barnraise.service"
    assert f"  wrote    {file}\n" in out
    assert "  ran      systemctl --user enable --now barnraise.service\n" in out
    assert "  undo     barnraise service remove\n" in out
    assert command(monkeypatch, "install") == 1
    assert "installed already" in capsys.readouterr().err
    assert command(monkeypatch, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["running"] is True
    assert command(monkeypatch, "remove") == 0
    assert f"  deleted  {file}\n" in capsys.readouterr().out


def test_install_with_running_agent_is_rejected(
    system: System, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    standing = ListenerStanding(bytes(32), 52416, [], "tls", 0, 4711, "0.1", agent=True)
    monkeypatch.setattr(service, "standing_of", lambda _: standing)
    assert command(monkeypatch, "install") == 1
    err = capsys.readouterr().err
    assert "4711" in err
    assert "barnraise down" in err
    assert list(tmp_path.rglob("*.service")) == []


# the keeper of Windows


def test_restart_loop_waits_longer_after_each_failure() -> None:
    codes, pauses, clock = iter([1, 1, 1, 1, 0]), [], [0.0]
    lives = iter([1.0, 1.0, 300.0, 1.0, 1.0])

    def start() -> int:
        clock[0] += next(lives)
        return next(codes)

    assert restart_loop.keep(start, sleep=pauses.append, now=lambda: clock[0]) == 0
    assert pauses == [2.0, 4.0, 2.0, 4.0], (
        "an agent that ran well for a while starts again with a short pause"
    )
    assert [restart_loop.pause(count) for count in (1, 5, 6, 1000)] == [2.0, 32.0, 60.0, 60.0]


def test_restart_loop_keeps_output_of_agent(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    program = "import os, sys; print(os.environ['WORD']); print('err', file=sys.stderr); sys.exit(3)"
    for _ in range(2):
        assert restart_loop.start_once([sys.executable, "-c", program], {"WORD": "hello"}, log) == 3
    assert sorted(log.read_text().split()) == ["err", "err", "hello", "hello"]
    assert log.stat().st_mode & 0o077 == 0
    log.write_bytes(bytes(6 * 1024 * 1024))
    restart_loop.start_once([sys.executable, "-c", program], {"WORD": "anew"}, log)
    assert log.stat().st_size < 100


def test_restart_loop_starts_agent_with_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[list[str], str, Path]] = []

    def start(command: list[str], environment: dict[str, str], log: Path) -> int:
        seen.append((command, environment["BARNRAISE_NETWORK_PEERS"], log))
        return 0

    monkeypatch.setattr(restart_loop, "start_once", start)
    arguments = ["--log", str(tmp_path / "log"), "--set", "BARNRAISE_NETWORK_PEERS=a=b"]
    assert restart_loop.main(arguments) == 0
    assert seen == [([sys.executable, "-P", "-m", "barnraise.agent"], "a=b", tmp_path / "log")]


# the seam itself


def test_missing_or_slow_command_is_not_an_error() -> None:
    assert runner(60.0)(["barnraise-no-such-command"]).returncode == NOT_FOUND
    done = runner(0.2)([sys.executable, "-c", "import time; time.sleep(30)"])
    assert done.returncode == TOO_SLOW
    assert "0.2 s" in done.stderr
    assert runner(60.0)([sys.executable, "-c", "print(1)"]).stdout.strip() == "1"
