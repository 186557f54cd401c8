"""A warden with real workers: how they end, what is said about it, and that nothing is left."""

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
    MOST_TAIL_BYTES,
    QUIET,
    AllExited,
    SupervisorNote,
    WorkerExited,
    WorkerLimits,
    WorkerStarted,
)
from barnraise.core.errors import RunError
from tests.repository import ROOT
from tests.unit.agent.warden_crew import DAEMONISE, Crew, is_alive, is_gone_within, order, said, worker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and sessions are Unix's")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")

SLEEP = "import time; print('ready'); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
)


def test_a_worker_that_raises_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        crew = await Crew.of(
            order(
                tmp_path, worker(tmp_path, "print('out'); raise KeyError('lost')"), worker(tmp_path, SLEEP, 1)
            )
        )
        await crew.until(lambda crew: crew.all(WorkerExited))
        failed = crew.ended(0)
        assert (failed.code, failed.signal, failed.out_of_memory) == (1, None, False)
        assert failed.tail.startswith(b"out\nTraceback")
        assert b"KeyError: 'lost'" in failed.tail
        assert abs(failed.at - time.monotonic()) < 60
        await asyncio.sleep(0.3)
        assert is_alive(crew.pid(1))
        assert crew.all(AllExited) == []
        await crew.warden.stop()
        await crew.end()
        assert (crew.ended(1).code, crew.ended(1).signal) == (None, signal.SIGTERM)
        assert [type(event) for event in crew.events] == [
            WorkerStarted,
            WorkerStarted,
            WorkerExited,
            WorkerExited,
            AllExited,
        ]
        assert list((tmp_path / "records").iterdir()) == []
        assert not is_alive(crew.warden.pid)

    asyncio.run(run())


def test_a_killed_worker_is_reported_at_once_with_its_signal(tmp_path: Path) -> None:
    async def run() -> None:
        ranks = (0, 1, 2)
        crew = await Crew.of(order(tmp_path, *(worker(tmp_path, SLEEP, rank) for rank in ranks)))
        await crew.until(lambda crew: len(crew.all(WorkerStarted)) == 3)
        delays = []
        for rank in ranks:
            await said(tmp_path / f"rank-{rank}.log", b"ready")
            killed_at = time.monotonic()
            os.kill(crew.pid(rank), signal.SIGKILL)
            await crew.until(lambda crew, count=rank + 1: len(crew.all(WorkerExited)) == count)
            assert (crew.ended(rank).code, crew.ended(rank).signal) == (None, signal.SIGKILL)
            assert crew.ended(rank).out_of_memory is not True
            delays.append(crew.ended(rank).at - killed_at)
        await crew.end()
        assert 0 <= min(delays) < 1.0, "of three, because this machine may stand still meanwhile"

    asyncio.run(run())


def test_one_that_ignores_the_request_is_killed_after_the_grace_by_name(tmp_path: Path) -> None:
    async def run() -> None:
        crew = await Crew.of(
            order(tmp_path, worker(tmp_path, SLEEP), worker(tmp_path, STUBBORN, 7), grace_s=1)
        )
        await said(tmp_path / "rank-7.log", b"ready")
        asked_at = time.monotonic()
        await crew.warden.stop()
        await crew.end()
        # On a slow machine even one that obeys may take longer than the grace: then it is named, too.
        late = [rank for rank in (0, 7) if crew.ended(rank).at - asked_at >= 1]
        assert late[-1] == 7
        assert crew.ended(0).signal == signal.SIGTERM or 0 in late
        assert crew.ended(7).signal == signal.SIGKILL
        assert crew.ended(7).out_of_memory is False
        assert crew.ended(7).at - asked_at < 60
        words = [f"rank {rank} did not end within 1 s of being asked to: it was killed" for rank in late]
        assert crew.notes().splitlines() in ([words[-1]], words)

    asyncio.run(run())


def test_a_hard_stop_does_not_wait(tmp_path: Path) -> None:
    async def run() -> None:
        crew = await Crew.of(order(tmp_path, worker(tmp_path, STUBBORN), grace_s=600))
        await crew.until(lambda crew: crew.all(WorkerStarted))
        await said(tmp_path / "rank-0.log", b"ready")
        await crew.warden.stop()
        await asyncio.sleep(0.2)
        assert is_alive(crew.pid(0))
        asked_at = time.monotonic()
        await crew.warden.stop(hard=True)
        await crew.end()
        assert crew.ended(0).at - asked_at < 60, "not for the ten minutes of its grace"
        assert crew.all(SupervisorNote) == []
        await crew.warden.stop()  # a warden that is gone needs no telling

    asyncio.run(run())


def test_a_worker_may_use_the_grace_to_finish(tmp_path: Path) -> None:
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
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program)))
        await said(tmp_path / "rank-0.log", b"ready")
        await crew.warden.stop()
        await crew.end()
        assert (crew.ended(0).code, crew.ended(0).tail) == (0, b"ready\nsaved\n")

    asyncio.run(run())


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    """Children that share its group, like those of a data loader, hold its pipe and its memory."""
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid); sys.exit(4)"

    async def run() -> None:
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program), worker(tmp_path, SLEEP, 1)))
        began = time.monotonic()
        await crew.until(lambda crew: crew.all(WorkerExited))
        assert time.monotonic() - began < 60, "not for the ten minutes of its child"
        assert crew.ended(0).code == 4
        assert is_gone_within(int(crew.ended(0).tail), 60)
        await crew.warden.stop(hard=True)
        await crew.end()

    asyncio.run(run())


@on_linux
def test_a_daemonised_child_does_not_outlive_the_run(tmp_path: Path) -> None:
    program = DAEMONISE + f"daemonise({str(tmp_path / 'daemon')!r})\nprint('done')"

    async def run() -> None:
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program)))
        await crew.end()
        assert (crew.ended(0).code, crew.ended(0).tail) == (0, b"done\n")
        assert not is_alive(int((tmp_path / "daemon").read_text()))

    asyncio.run(run())


def test_a_flood_of_output_is_bounded_and_does_not_delay_a_stop(tmp_path: Path) -> None:
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
    most = 4 << 20

    async def run() -> None:
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program), log_bytes=most, grace_s=600))
        largest = 0

        async def flooded(size: float) -> None:
            nonlocal largest
            async with asyncio.timeout(90):
                while read_log(tmp_path / "rank-0.log", 0, 0).end < size:
                    largest = max(largest, _kept(tmp_path))
                    await asyncio.sleep(0.02)

        await flooded(10e6)
        before = psutil.Process(crew.warden.pid).memory_info().rss
        await flooded(100e6)
        assert psutil.Process(crew.warden.pid).memory_info().rss - before < 4 << 20
        asked_at = time.monotonic()
        await crew.warden.stop()
        await crew.end()
        assert time.monotonic() - asked_at < 60, "not for the ten minutes of its grace"
        assert largest <= most
        assert len(crew.ended(0).tail) == MOST_TAIL_BYTES

    asyncio.run(run())


def _kept(home: Path) -> int:
    total = 0
    for file in home.glob("rank-0.log.*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            pass
    return total


def test_the_tail_is_the_last_of_both_streams_in_order(tmp_path: Path) -> None:
    program = """
import os
os.write(1, b"a" * 20_000)
os.write(2, b"b" * 5_000)
os.write(1, b"c" * 1_000)
"""

    async def run() -> None:
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program)))
        await crew.end()
        assert crew.ended(0).tail == b"a" * (MOST_TAIL_BYTES - 6_000) + b"b" * 5_000 + b"c" * 1_000
        part = read_log(tmp_path / "rank-0.log", 19_999, 2)
        assert (part.start, part.data, part.end) == (19_999, b"ab", 26_000)

    asyncio.run(run())


def test_workers_that_cannot_start_say_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("print('no shebang, not executable')")
    missing = str(tmp_path / "missing")

    async def run() -> None:
        crew = await Crew.of(
            order(
                tmp_path,
                worker(tmp_path, "", 0, command=(missing, "train.py")),
                worker(tmp_path, "", 1, directory=missing),
                worker(tmp_path, "", 2, environment={f"V{i}": "x" * 100_000 for i in range(60)}),
                worker(tmp_path, "", 3, command=(str(script),)),
                worker(tmp_path, "", 4, environment={"A": "nul\0"}),
                worker(tmp_path, "print('fine')", 5),
            )
        )
        await crew.end()
        assert [event.rank for event in crew.all(WorkerStarted)] == [5]
        for rank, words in enumerate(
            ["there is no program", "its directory", "pass fewer", "may be executed", "correct its command"]
        ):
            assert (crew.ended(rank).code, crew.ended(rank).signal) == (None, None)
            sentence = crew.ended(rank).tail.decode()
            assert sentence.startswith(f"rank {rank} was not started: ")
            assert words in sentence
            assert sentence in read_log(tmp_path / f"rank-{rank}.log", 0, 10_000).data.decode()
        assert crew.ended(5).code == 0

    asyncio.run(run())


@on_linux
def test_a_full_disk_loses_output_only(tmp_path: Path) -> None:
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
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program)))
        await crew.until(lambda crew: crew.all(SupervisorNote))
        await asyncio.sleep(1.1)  # the disk is tried again after a second
        (tmp_path / "go").touch()
        await crew.end()
        assert crew.ended(0).code == 0
        assert crew.ended(0).tail == b"lost\nkept\n"
        assert crew.notes() == "the disk of this machine is full: output of rank 0 is not kept"
        part = read_log(tmp_path / "rank-0.log", 0, 100)
        assert (part.start, part.data, part.end) == (5, b"kept\n", 10)

    asyncio.run(run())


@on_linux
def test_a_small_disk_that_fills_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount a disk")
    program = "import os\nfor _ in range(300): os.write(1, b'x' * 99_999 + b'\\n')\nprint('done')"

    async def run() -> None:
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program, log=str(disk / "rank-0.log"))))
        await crew.end()
        assert crew.ended(0).code == 0
        assert crew.ended(0).tail.endswith(b"x\ndone\n")
        assert crew.notes() == "the disk of this machine is full: output of rank 0 is not kept"
        assert 500_000 < len(read_log(disk / "rank-0.log", 0, 1 << 30).data) <= 1 << 20

    try:
        asyncio.run(run())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@on_linux
def test_limits_hold_for_the_workers_alone(tmp_path: Path) -> None:
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
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program), limits=limits))
        await crew.end()
        cores = max(1, len(os.sched_getaffinity(0)) - 1)
        expected = f"19 {cores} IOPRIO_CLASS_IDLE\n{1 << 30}\nrefused\n"
        assert crew.ended(0).tail.decode() == expected

    asyncio.run(run())


def _fields(limits: WorkerLimits) -> dict[str, int]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}


@on_linux
def test_a_worker_inherits_nothing_it_should_not(tmp_path: Path) -> None:
    program = """
import os, signal, sys
print(sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM) == 0)
print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())
print(sorted(set(os.environ) - {"LC_CTYPE"}))
"""

    async def run() -> None:
        crew = await Crew.of(order(tmp_path, worker(tmp_path, program)))
        await crew.end()
        assert crew.ended(0).tail.decode().splitlines() == [
            "['0', '1', '2'] 4",
            "True True",
            "'' True",
            "['BARNRAISE_WARDEN', 'PYTHONUNBUFFERED']",
        ]

    asyncio.run(run())


def test_a_warden_imports_little() -> None:
    program = (
        "import sys, barnraise.agent.supervisor.__main__\n"
        "print({'asyncio', 'psutil', 'numpy', 'torch', 'cryptography', 'logging'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment)
    assert done.stdout.split() == [b"set()"]


def test_a_warden_that_cannot_be_started_is_an_error_with_advice(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(RunError, match="cannot be started with /no/such/python"):
            await Crew.of(order(tmp_path, worker(tmp_path, "")), python="/no/such/python")
        many = [worker(tmp_path, "", rank, environment={"A": "x" * 100_000}) for rank in range(200)]
        with pytest.raises(RunError, match="at most"):
            await Crew.of(order(tmp_path, *many))
        with pytest.raises(RunError, match="memory_bytes"):
            await Crew.of(order(tmp_path, worker(tmp_path, ""), limits=WorkerLimits(memory_bytes=5)))

    asyncio.run(run())
