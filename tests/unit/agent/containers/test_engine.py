"""Choice of the engine, and removal of leftover containers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from barnraise.agent.containers.engine import ContainerEngine, parse_info, remove_leftovers
from barnraise.environments.build_process import run_build_command
from barnraise.environments.installed_packages import packages_of
from tests.unit.agent.containers.fake_engine import FakeEngine
from tests.unit.event_loop import WithoutSubprocesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers work on Linux only")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (" Security Options:\n  seccomp\n   Profile: builtin\n  cgroupns\n", ContainerEngine("x")),
        (" Security Options:\n  seccomp\n  rootless\n  cgroupns\n", ContainerEngine("x", rootless=True)),
        (
            "host:\n  conmon:\n    path: y\n  security:\n    rootless: false\n",
            ContainerEngine("x", podman=True),
        ),
        (
            "host:\n  conmon:\n    path: y\n  security:\n    rootless: true\n",
            ContainerEngine("x", True, True),
        ),
    ],
)
def test_parse_info_tells_podman_and_rootless(info: str, expected: ContainerEngine) -> None:
    assert parse_info("x", info) == expected


def test_remove_leftovers_only_of_own_state_directory(engine: FakeEngine, tmp_path: Path) -> None:
    remove_leftovers(tmp_path)
    assert not engine.calls, "a machine that never had a container asks no engine"
    for name, state in (("mine", tmp_path), ("others", tmp_path / "other")):
        engine.running[name] = process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        engine.labels[name] = {f"barnraise.state={state}"}

        def bury(name: str = name, process: subprocess.Popen[bytes] = process) -> None:
            process.wait()
            del engine.running[name]

        threading.Thread(target=bury, daemon=True).start()
    note = tmp_path / "containers"
    note.write_text(str(engine.path / "docker"))
    remove_leftovers(tmp_path)
    assert set(engine.running) == {"others"}
    assert not note.exists()


def test_remove_leftovers_failing_engine_is_retried_next_start(tmp_path: Path) -> None:
    note = tmp_path / "containers"
    note.write_text("/bin/false")
    remove_leftovers(tmp_path)
    assert note.exists()


def test_commands_run_on_loop_without_subprocess_support(engine: FakeEngine, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=WithoutSubprocesses) as runner:
        with pytest.raises(NotImplementedError):
            runner.run(asyncio.create_subprocess_exec("true"))
        assert runner.run(packages_of(Path(sys.executable), ["json"])).package("json") is not None
        lines: list[str] = []
        assert runner.run(run_build_command(("echo", "a"), tmp_path, os.environ, lines.append)) == (0, ["a"])
        assert lines == ["a"]
