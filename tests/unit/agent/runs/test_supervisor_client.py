"""The agent or the supervisor dies: no worker and none of its children outlives them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from barnraise.agent.runs import supervisor_client
from barnraise.agent.runs.supervisor_client import OrphanProcess, kill_orphans
from barnraise.agent.supervisor.messages import AllExited, SupervisorNote, WorkerExited, WorkerStarted
from barnraise.agent.supervisor.pidfile import PidRecord, ProcessIdentity, write_record
from tests.repository import ROOT
from tests.unit.agent.supervised_workers import (
    DAEMONISE,
    Supervised,
    is_alive,
    is_gone_within,
    launch,
    wait_for_output,
    worker,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and sessions are Unix's")

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
)
# An agent with one supervisor; it prints the supervisor's and the workers' numbers.
AGENT = """
import asyncio, sys, time
from pathlib import Path
from tests.unit.agent.supervised_workers import *
async def main():
    home = Path(sys.argv[1])
    group = await Supervised.start(launch(home, worker(home, sys.argv[2]), worker(home, sys.argv[2], 1)))
    await group.until(lambda group: len(group.all(WorkerStarted)) == 2)
    for rank in (0, 1):
        await wait_for_output(home / f"rank-{rank}.log", b"ready")
    print(group.supervisor.pid, group.pid(0), group.pid(1), flush=True)
    await group.wait_exit(600)
asyncio.run(main())
"""


def _with_daemon(home: Path) -> str:
    """Each rank has a daemon of its own; the file's name ends with its parent's number."""
    return DAEMONISE + f"daemonise({str(home)!r} + '/daemon-' + str(os.getpid()))\n" + STUBBORN


def _daemons(home: Path) -> list[int]:
    return [int(file.read_text()) for file in home.glob("daemon-*")]


def _agent(home: Path, program: str) -> tuple[subprocess.Popen[str], list[int]]:
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(home), program], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    return agent, [int(word) for word in agent.stdout.readline().split()]


def _end(agent: subprocess.Popen[str]) -> None:
    agent.kill()
    agent.wait()
    assert agent.stdout is not None
    agent.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")
def test_killed_agent_takes_all_processes_along(tmp_path: Path) -> None:
    agent, pids = _agent(tmp_path, _with_daemon(tmp_path))
    assert len(pids) == 3
    daemons = _daemons(tmp_path)
    assert len(daemons) == 2
    _end(agent)
    for pid in (*pids, *daemons):
        assert is_gone_within(pid, 60)
    assert list((tmp_path / "records").iterdir()) == []


def test_killed_supervisor_takes_workers_along_and_each_exit_is_reported(tmp_path: Path) -> None:
    async def run() -> None:
        program = _with_daemon(tmp_path)
        group = await Supervised.start(
            launch(tmp_path, worker(tmp_path, program), worker(tmp_path, "print('early')", 1))
        )
        await group.until(lambda group: group.all(WorkerExited))
        await wait_for_output(tmp_path / "rank-0.log", b"ready\n")
        os.kill(group.supervisor.pid, signal.SIGKILL)
        await group.wait_exit()
        assert is_gone_within(group.pid(0), 60)
        (daemon,) = _daemons(tmp_path)
        assert not is_alive(daemon)
        assert (group.exited(0).code, group.exited(0).signal, group.exited(0).tail) == (
            None,
            None,
            b"ready\n",
        )
        assert group.exited(1).code == 0
        assert "the supervisor of run run-1 died" in group.notes()
        assert [type(event) for event in group.events[-3:]] == [SupervisorNote, WorkerExited, AllExited]
        assert list((tmp_path / "records").iterdir()) == []

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="the signal on a parent's death is Linux's")
def test_workers_die_with_killed_supervisor_without_cleanup(tmp_path: Path) -> None:
    agent, (supervisor, *workers) = _agent(tmp_path, STUBBORN)
    os.kill(agent.pid, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    for pid in workers:
        assert is_gone_within(pid, 60)
    _end(agent)


@pytest.mark.skipif(sys.platform != "linux", reason="it finds stopped processes in /proc")
def test_kill_orphans_of_earlier_agent(tmp_path: Path) -> None:
    agent, (supervisor, *workers) = _agent(tmp_path, _with_daemon(tmp_path))
    os.kill(supervisor, signal.SIGSTOP)  # so that it cannot clean up
    _end(agent)
    daemons = _daemons(tmp_path)
    for pid in (supervisor, *workers, *daemons):
        assert is_alive(pid)
    (orphans,) = kill_orphans(tmp_path / "records")
    assert (orphans.run, orphans.generation) == ("run-1", 3)
    assert 3 <= orphans.killed <= 5  # once the supervisor is dead, the kernel may be faster with its workers
    for pid in (supervisor, *workers, *daemons):
        assert is_gone_within(pid, 60)
    assert list((tmp_path / "records").iterdir()) == []
    assert kill_orphans(tmp_path / "records") == []


def test_kill_orphans_spares_reused_process_id(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        record = PidRecord("0" * 32, "old", 1, None, (ProcessIdentity(stranger.pid, time.time() - 60),))
        write_record(tmp_path, record)
        (tmp_path / "junk.supervisor").write_bytes(b"\xff not a record")
        assert kill_orphans(tmp_path) == [OrphanProcess("old", 1, 0)]
        assert list(tmp_path.iterdir()) == []
        assert stranger.poll() is None
        started = psutil.Process(stranger.pid).create_time()
        write_record(tmp_path, PidRecord("0" * 32, "old", 1, None, (ProcessIdentity(stranger.pid, started),)))
        assert kill_orphans(tmp_path) == [OrphanProcess("old", 1, 1)]
        assert stranger.wait(60) == -signal.SIGKILL


def test_kill_orphans_without_pid_files(tmp_path: Path) -> None:
    assert kill_orphans(tmp_path / "never") == []


@pytest.mark.parametrize("words", [r"\377\377\377\377", r"\003\000\000\000abc", ""])
def test_supervisor_with_invalid_messages_is_killed(tmp_path: Path, words: str) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nprintf '{words}'\n{'exec sleep 600' if words else ''}\n")
    fake.chmod(0o755)

    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, "")), python=str(fake))
        await group.wait_exit()
        assert (group.exited(0).code, group.exited(0).signal) == (None, None)
        assert not is_alive(group.supervisor.pid)
        assert group.all(WorkerStarted) == []

    asyncio.run(run())


def test_hanging_supervisor_is_killed_after_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_client, "_PATIENCE_S", 0.3)

    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, STUBBORN), grace_s=600))
        await wait_for_output(tmp_path / "rank-0.log", b"ready")
        os.kill(group.supervisor.pid, signal.SIGSTOP)
        await group.supervisor.stop()  # with a grace of ten minutes, which the harder word cuts short
        await group.supervisor.stop(hard=True)
        await group.wait_exit()
        assert is_gone_within(group.pid(0), 60)
        assert (group.exited(0).code, group.exited(0).signal) == (None, None)

    asyncio.run(run())


def test_listener_that_raises_still_gets_all_events(tmp_path: Path) -> None:
    class Failing(Supervised):
        def _on_event(self, event: object) -> None:
            super()._on_event(event)  # type: ignore[arg-type]
            raise ZeroDivisionError

    async def run() -> None:
        group = await Failing.start(launch(tmp_path, worker(tmp_path, "")))
        await group.wait_exit()
        assert group.exited(0).code == 0
        assert len(group.all(AllExited)) == 1

    asyncio.run(run())
