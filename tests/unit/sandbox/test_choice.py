"""Real sandbox of this machine: a script in it tries what it must not do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from barnraise.core.errors import RunEnvironmentError
from barnraise.sandbox.choice import Sandbox, find_sandbox, sandbox_sentence, sandboxed
from barnraise.sandbox.spec import SandboxSpec, python_roots

needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or not find_sandbox().is_possible, reason="no sandbox is possible here"
)
HOSTILE = """
import ctypes, os, pathlib, signal, socket, sys
state, other, home, victim, port = sys.argv[1:]
def attempt(name, action):
    try:
        print(name, "SUCCEEDED" if action() else "refused")
    except OSError as error:
        print(name, "refused", type(error).__name__)
attempt("read key", lambda: pathlib.Path(state, "node.key").read_bytes())
attempt("list state", lambda: os.listdir(state))
attempt("agent socket", lambda: socket.socket(socket.AF_UNIX).connect(f"{state}/listener.sock") is None)
attempt("signal", lambda: os.kill(int(victim), signal.SIGKILL) is None)
attempt("see process", lambda: os.path.exists(f"/proc/{victim}"))
attempt("write outside", lambda: pathlib.Path(other, "x").write_text("x"))
attempt("write system", lambda: pathlib.Path("/usr/lib/x").write_text("x"))
attempt("host loopback", lambda: socket.create_connection(("127.0.0.1", int(port)), 3))
attempt("internet", lambda: socket.create_connection(("192.0.2.1", 80), 3))
attempt("new namespaces", lambda: ctypes.CDLL(None).unshare(0x10000000) == 0)
attempt("mount", lambda: ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0)
attempt("home", lambda: os.listdir(home))
pathlib.Path("result").write_text("written")
print("own folder", pathlib.Path("result").read_text(), os.environ.get("A_SECRET"), os.environ["HOME"])
"""


def spec_at(root: Path, **changes: object) -> SandboxSpec:
    folder = root / "run" / "folder"
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {
        "root": str(root / "run" / "sandbox"),
        "directory": str(folder),
        "writable": (str(folder),),
        "readable": python_roots(Path(sys.executable)),
        "hidden": (str(root / "state"), str(Path.home())),
    }
    return SandboxSpec(**{**values, **changes})  # type: ignore[arg-type]


@needs_sandbox
def test_sandboxed_script_sees_and_changes_only_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries keys, the agent's socket, processes, files and networks of the machine."""
    state, other, home = tmp_path / "state", tmp_path / "other", tmp_path / "home"
    for directory in (state, other, home):
        directory.mkdir()
    (home / "diary").write_text("private")
    monkeypatch.setenv("HOME", str(home))
    (state / "node.key").write_text("a key")
    spec = spec_at(tmp_path)
    (Path(spec.directory) / "hostile.py").write_text(HOSTILE)
    environment = {**os.environ, "A_SECRET": "x"}
    with (
        socket.socket(socket.AF_UNIX) as agent,
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim,
    ):
        monkeypatch.chdir(state)
        agent.bind("listener.sock")
        agent.listen()
        arguments = (str(state), str(other), str(home), str(victim.pid), str(server.getsockname()[1]))
        wrapped = sandboxed(find_sandbox(), spec, (sys.executable, "hostile.py", *arguments), environment, {})
        done = subprocess.run(
            wrapped.command, env=wrapped.environment, capture_output=True, text=True, timeout=120
        )
        assert victim.poll() is None
        assert victim.stdin is not None
        victim.stdin.close()
    assert done.returncode == 0, done.stderr
    assert "SUCCEEDED" not in done.stdout, done.stdout
    assert done.stdout.count("refused") == 12
    assert f"own folder written None {spec.home}" in done.stdout
    assert not list(other.iterdir())
    assert Path(spec.directory, "result").read_text() == "written"


@needs_sandbox
def test_sandboxed_script_is_asked_to_end_and_can_still_act(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "def end(*_):\n    open('ended', 'w').write('politely')\n    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, end)\nopen('begun', 'w')\ntime.sleep(600)\n"
    )
    spec = spec_at(tmp_path)
    wrapped = sandboxed(find_sandbox(), spec, (sys.executable, "-c", script), os.environ, {})
    process = subprocess.Popen(wrapped.command, env=wrapped.environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not Path(spec.directory, "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 7
    assert Path(spec.directory, "ended").read_text() == "politely"


@needs_sandbox
def test_sandboxed_script_that_is_killed_has_its_signal_as_code(tmp_path: Path) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    spec = spec_at(tmp_path)
    wrapped = sandboxed(find_sandbox(), spec, (sys.executable, "-c", script), os.environ, {})
    assert subprocess.run(wrapped.command, env=wrapped.environment, timeout=60).returncode == 137


@needs_sandbox
def test_sandboxed_variables_reach_the_script_and_not_what_makes_the_sandbox(tmp_path: Path) -> None:
    """Tries a library that would be loaded outside of the sandbox."""
    spec = spec_at(tmp_path)
    given = {"LD_PRELOAD": f"{spec.directory}/evil.so", "RANK": "0", "HOME": "/elsewhere"}
    script = "import os; print(os.environ['RANK'], os.environ['LD_PRELOAD'], os.environ['HOME'])"
    wrapped = sandboxed(find_sandbox(), spec, (sys.executable, "-c", script), os.environ, given)
    assert not {"LD_PRELOAD", "RANK"} & set(wrapped.environment)
    assert "evil.so" not in " ".join(wrapped.command), "every user can read a command line"
    done = subprocess.run(
        wrapped.command, env=wrapped.environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == f"0 {given['LD_PRELOAD']} {spec.home}"


def test_sandbox_sentence_says_if_there_is_none() -> None:
    none = Sandbox("none", reason="bubblewrap is not installed")
    assert sandbox_sentence(sandbox=none) == (
        "No sandbox is possible on this machine (bubblewrap is not installed). "
        "The script could do everything that you can do here."
    )
    assert "as you chose" in sandbox_sentence(is_wanted=False, sandbox=none)
    assert "confines the script" in sandbox_sentence(sandbox=Sandbox("bubblewrap", "bwrap"))
    assert "does not limit the network" in sandbox_sentence(sandbox=Sandbox("restricted token", "python"))


def test_sandboxed_without_sandbox_raises(tmp_path: Path) -> None:
    with pytest.raises(RunEnvironmentError, match="this machine has no sandbox: not here"):
        sandboxed(Sandbox("none", reason="not here"), spec_at(tmp_path), ("python",), {}, {})
