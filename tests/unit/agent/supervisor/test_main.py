"""A supervisor with real workers: their exits, the reports, and that no process is left."""

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

from barnraise.agent.runs.supervisor_client import read_log
from barnraise.agent.supervisor.messages import (
    MARK_VARIABLE,
    MAX_TAIL_BYTES,
    QUIET,
    AllExited,
    SupervisorNote,
    WorkerExited,
    WorkerLimits,
    WorkerStarted,
)
from barnraise.core.errors import RunError
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
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")

SLEEP = "import time; print('ready'); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
)


def test_failed_worker_is_reported_and_others_continue(tmp_path: Path) -> None:
    async def run() -> None:
        group = await Supervised.start(
            launch(
                tmp_path, worker(tmp_path, "print('out'); raise KeyError('lost')"), worker(tmp_path, SLEEP, 1)
            )
        )
        await group.until(lambda group: group.all(WorkerExited))
        failed = group.exited(0)
        assert (failed.code, failed.signal, failed.out_of_memory) == (1, None, False)
        assert failed.tail.startswith(b"out\nTraceback")
        assert b"KeyError: 'lost'" in failed.tail
        assert abs(failed.at - time.monotonic()) < 60
        await asyncio.sleep(0.3)
        assert is_alive(group.pid(1))
        assert group.all(AllExited) == []
        await group.supervisor.stop()
        await group.wait_exit()
        assert (group.exited(1).code, group.exited(1).signal) == (None, signal.SIGTERM)
        assert [type(event) for event in group.events] == [
            WorkerStarted,
            WorkerStarted,
            WorkerExited,
            WorkerExited,
            AllExited,
        ]
        assert list((tmp_path / "records").iterdir()) == []
        assert not is_alive(group.supervisor.pid)

    asyncio.run(run())


def test_killed_worker_is_reported_with_signal(tmp_path: Path) -> None:
    async def run() -> None:
        ranks = (0, 1, 2)
        group = await Supervised.start(launch(tmp_path, *(worker(tmp_path, SLEEP, rank) for rank in ranks)))
        await group.until(lambda group: len(group.all(WorkerStarted)) == 3)
        delays = []
        for rank in ranks:
            await wait_for_output(tmp_path / f"rank-{rank}.log", b"ready")
            killed_at = time.monotonic()
            os.kill(group.pid(rank), signal.SIGKILL)
            await group.until(lambda group, count=rank + 1: len(group.all(WorkerExited)) == count)
            assert (group.exited(rank).code, group.exited(rank).signal) == (None, signal.SIGKILL)
            assert group.exited(rank).out_of_memory is not True
            delays.append(group.exited(rank).at - killed_at)
        await group.wait_exit()
        assert 0 <= min(delays) < 1.0, "of three, because this machine may stand still meanwhile"

    asyncio.run(run())


def test_worker_ignoring_sigterm_is_killed_after_grace(tmp_path: Path) -> None:
    async def run() -> None:
        group = await Supervised.start(
            launch(tmp_path, worker(tmp_path, SLEEP), worker(tmp_path, STUBBORN, 7), grace_s=1)
        )
        await wait_for_output(tmp_path / "rank-7.log", b"ready")
        asked_at = time.monotonic()
        await group.supervisor.stop()
        await group.wait_exit()
        # On a slow machine even one that obeys may take longer than the grace: then it is named, too.
        late = [rank for rank in (0, 7) if group.exited(rank).at - asked_at >= 1]
        assert late[-1] == 7
        assert group.exited(0).signal == signal.SIGTERM or 0 in late
        assert group.exited(7).signal == signal.SIGKILL
        assert group.exited(7).out_of_memory is False
        assert group.exited(7).at - asked_at < 60
        words = [f"rank {rank} did not exit within 1 s of SIGTERM and was killed" for rank in late]
        assert group.notes().splitlines() in ([words[-1]], words)

    asyncio.run(run())


def test_hard_stop_kills_without_grace(tmp_path: Path) -> None:
    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, STUBBORN), grace_s=600))
        await group.until(lambda group: group.all(WorkerStarted))
        await wait_for_output(tmp_path / "rank-0.log", b"ready")
        await group.supervisor.stop()
        await asyncio.sleep(0.2)
        assert is_alive(group.pid(0))
        asked_at = time.monotonic()
        await group.supervisor.stop(hard=True)
        await group.wait_exit()
        assert group.exited(0).at - asked_at < 60, "not for the ten minutes of its grace"
        assert group.all(SupervisorNote) == []
        await group.supervisor.stop()  # a supervisor that is gone needs no telling

    asyncio.run(run())


def test_worker_may_finish_within_grace(tmp_path: Path) -> None:
    program = """
import signal, sys, time
def finish(number, frame):
    time.sleep(0.3)
    print("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, finish)
print("ready")
time.sleep(600)
"""

    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, program)))
        await wait_for_output(tmp_path / "rank-0.log", b"ready")
        await group.supervisor.stop()
        await group.wait_exit()
        assert (group.exited(0).code, group.exited(0).tail) == (0, b"ready\nsaved\n")

    asyncio.run(run())


def test_children_of_worker_are_killed_with_it(tmp_path: Path) -> None:
    """Children that share its group, like those of a data loader, hold its pipe and its memory."""
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid); sys.exit(4)"

    async def run() -> None:
        group = await Supervised.start(
            launch(tmp_path, worker(tmp_path, program), worker(tmp_path, SLEEP, 1))
        )
        began = time.monotonic()
        await group.until(lambda group: group.all(WorkerExited))
        assert time.monotonic() - began < 60, "not for the ten minutes of its child"
        assert group.exited(0).code == 4
        assert is_gone_within(int(group.exited(0).tail), 60)
        await group.supervisor.stop(hard=True)
        await group.wait_exit()

    asyncio.run(run())


@on_linux
def test_daemonised_child_does_not_outlive_run(tmp_path: Path) -> None:
    program = DAEMONISE + f"daemonise({str(tmp_path / 'daemon')!r})\nprint('done')"

    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, program)))
        await group.wait_exit()
        assert (group.exited(0).code, group.exited(0).tail) == (0, b"done\n")
        assert not is_alive(int((tmp_path / "daemon").read_text()))

    asyncio.run(run())


def test_output_flood_is_bounded_and_does_not_delay_stop(tmp_path: Path) -> None:
    # About 100 MB/s: as much as the machine takes in 10 ms steps.
    program = """
import os, time
line = b"x" * 999 + b"\\n"
begin = time.monotonic()
sent = 0
while True:
    os.write(1, line * 100)
    sent += 100_000
    ahead = sent / 100e6 - (time.monotonic() - begin)
    if ahead > 0.01:
        time.sleep(ahead)
"""
    max_bytes = 4 << 20

    async def run() -> None:
        group = await Supervised.start(
            launch(tmp_path, worker(tmp_path, program), log_bytes=max_bytes, grace_s=600)
        )
        largest = 0

        async def flooded(size: float) -> None:
            nonlocal largest
            async with asyncio.timeout(90):
                while read_log(tmp_path / "rank-0.log", 0, 0).end < size:
                    largest = max(largest, _kept(tmp_path))
                    await asyncio.sleep(0.02)

        await flooded(10e6)
        before = psutil.Process(group.supervisor.pid).memory_info().rss
        await flooded(100e6)
        assert psutil.Process(group.supervisor.pid).memory_info().rss - before < 4 << 20
        asked_at = time.monotonic()
        await group.supervisor.stop()
        await group.wait_exit()
        assert time.monotonic() - asked_at < 60, "not for the ten minutes of its grace"
        assert largest <= max_bytes
        assert len(group.exited(0).tail) == MAX_TAIL_BYTES

    asyncio.run(run())


def _kept(home: Path) -> int:
    total = 0
    for file in home.glob("rank-0.log.*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            pass
    return total


def test_tail_has_end_of_both_streams_in_order(tmp_path: Path) -> None:
    program = """
import os
os.write(1, b"a" * 20_000)
os.write(2, b"b" * 5_000)
os.write(1, b"c" * 1_000)
"""

    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, program)))
        await group.wait_exit()
        assert group.exited(0).tail == b"a" * (MAX_TAIL_BYTES - 6_000) + b"b" * 5_000 + b"c" * 1_000
        part = read_log(tmp_path / "rank-0.log", 19_999, 2)
        assert (part.start, part.data, part.end) == (19_999, b"ab", 26_000)

    asyncio.run(run())


def test_workers_that_cannot_start_report_fix(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("print('no shebang, not executable')")
    missing = str(tmp_path / "missing")

    async def run() -> None:
        group = await Supervised.start(
            launch(
                tmp_path,
                worker(tmp_path, "", 0, command=(missing, "train.py")),
                worker(tmp_path, "", 1, directory=missing),
                worker(tmp_path, "", 2, environment={f"V{i}": "x" * 100_000 for i in range(60)}),
                worker(tmp_path, "", 3, command=(str(script),)),
                worker(tmp_path, "", 4, environment={"A": "nul\0"}),
                worker(tmp_path, "print('fine')", 5),
            )
        )
        await group.wait_exit()
        assert [event.rank for event in group.all(WorkerStarted)] == [5]
        for rank, words in enumerate(
            [
                "there is no program",
                "its directory",
                "pass fewer",
                "make its file executable",
                "correct its command",
            ]
        ):
            assert (group.exited(rank).code, group.exited(rank).signal) == (None, None)
            sentence = group.exited(rank).tail.decode()
            assert sentence.startswith(f"rank {rank} was not started: ")
            assert words in sentence
            assert sentence in read_log(tmp_path / f"rank-{rank}.log", 0, 10_000).data.decode()
        assert group.exited(5).code == 0

    asyncio.run(run())


@on_linux
def test_full_disk_loses_only_output(tmp_path: Path) -> None:
    """A device that is always full stands in for the first segment: the kernel says the same."""
    (tmp_path / "rank-0.log.00000000000000000000").symlink_to("/dev/full")
    program = """
import os, time
print("lost")
while not os.path.exists("go"):
    time.sleep(0.01)
print("kept")
"""

    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, program)))
        await group.until(lambda group: group.all(SupervisorNote))
        await asyncio.sleep(1.1)  # the disk is tried again after a second
        (tmp_path / "go").touch()
        await group.wait_exit()
        assert group.exited(0).code == 0
        assert group.exited(0).tail == b"lost\nkept\n"
        assert group.notes() == "the disk of this machine is full: output of rank 0 is lost"
        part = read_log(tmp_path / "rank-0.log", 0, 100)
        assert (part.start, part.data, part.end) == (5, b"kept\n", 10)

    asyncio.run(run())


@on_linux
def test_disk_filling_up_loses_only_output(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount a disk")
    program = "import os\nfor _ in range(300): os.write(1, b'x' * 99_999 + b'\\n')\nprint('done')"

    async def run() -> None:
        group = await Supervised.start(
            launch(tmp_path, worker(tmp_path, program, log=str(disk / "rank-0.log")))
        )
        await group.wait_exit()
        assert group.exited(0).code == 0
        assert group.exited(0).tail.endswith(b"x\ndone\n")
        assert group.notes() == "the disk of this machine is full: output of rank 0 is lost"
        assert 500_000 < len(read_log(disk / "rank-0.log", 0, 1 << 30).data) <= 1 << 20

    try:
        asyncio.run(run())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@on_linux
def test_limits_apply_to_workers_only(tmp_path: Path) -> None:
    program = """
import os, resource, psutil, time
until = time.monotonic() + 60
while psutil.Process().ionice().ioclass != psutil.IOPRIO_CLASS_IDLE and time.monotonic() < until:
    time.sleep(0.01)  # it is set from outside, soon
print(os.nice(0), len(os.sched_getaffinity(0)), psutil.Process().ionice().ioclass.name)
print(resource.getrlimit(resource.RLIMIT_DATA)[0])
try:
    bytearray(2 << 30)
except MemoryError:
    print("refused")
"""
    limits = WorkerLimits(**{**_fields(QUIET), "memory_bytes": 1 << 30})

    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, program), limits=limits))
        await group.wait_exit()
        cores = max(1, len(os.sched_getaffinity(0)) - 1)
        expected = f"19 {cores} IOPRIO_CLASS_IDLE\n{1 << 30}\nrefused\n"
        assert group.exited(0).tail.decode() == expected

    asyncio.run(run())


def _fields(limits: WorkerLimits) -> dict[str, int]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}


@on_linux
def test_worker_inherits_no_descriptors_or_signals(tmp_path: Path) -> None:
    program = """
import os, signal, sys
print(sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM) == 0)
print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())
print(sorted(set(os.environ) - {"LC_CTYPE"}))
"""

    async def run() -> None:
        group = await Supervised.start(launch(tmp_path, worker(tmp_path, program)))
        await group.wait_exit()
        assert group.exited(0).tail.decode().splitlines() == [
            "['0', '1', '2'] 4",
            "True True",
            "'' True",
            f"['{MARK_VARIABLE}', 'PYTHONUNBUFFERED']",
        ]

    asyncio.run(run())


def test_supervisor_imports_few_modules() -> None:
    program = (
        "import sys, barnraise.agent.supervisor.__main__\n"
        "print({'asyncio', 'psutil', 'numpy', 'torch', 'cryptography', 'logging'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment)
    assert done.stdout.split() == [b"set()"]


def test_supervisor_start_failure_raises_run_error(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(RunError, match="cannot start the worker supervisor with /no/such/python"):
            await Supervised.start(launch(tmp_path, worker(tmp_path, "")), python="/no/such/python")
        many = [worker(tmp_path, "", rank, environment={"A": "x" * 100_000}) for rank in range(200)]
        with pytest.raises(RunError, match="at most"):
            await Supervised.start(launch(tmp_path, *many))
        with pytest.raises(RunError, match="memory_bytes"):
            await Supervised.start(
                launch(tmp_path, worker(tmp_path, ""), limits=WorkerLimits(memory_bytes=5))
            )

    asyncio.run(run())
