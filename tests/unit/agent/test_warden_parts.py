"""The warden's pure decisions, its messages, its limits, and Windows' job objects through a fake."""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent.warden import linux
from barnraise.agent.warden.decisions import (
    STUCK_S,
    Effect,
    Happening,
    InputEnded,
    Kill,
    Supervision,
    Terminate,
    TimePassed,
    decide,
    next_deadline,
)
from barnraise.agent.warden.limits import chosen_cpus
from barnraise.agent.warden.messages import (
    QUIET,
    AllEnded,
    Ended,
    Limits,
    Note,
    Order,
    Started,
    Stop,
    WorkerOrder,
    frame_of,
    read_event,
    read_order,
    read_stop,
)
from barnraise.agent.warden.windows_job import Job
from barnraise.core.config import load_settings
from barnraise.core.errors import ProtocolError
from tests.unit.changed_bytes import changed

_WORKER = WorkerOrder(0, 0, ("python", "train.py"), "/tmp", {"A": "b"}, "/tmp/log")
_ORDER = Order("run-1", 1, (_WORKER,), "/tmp/records", QUIET)


def _after(state: Supervision, *happenings: tuple[Happening, float]) -> tuple[Supervision, list[Effect]]:
    effects: list[Effect] = []
    for happening, now in happenings:
        state, more = decide(state, happening, now)
        effects += more
    return state, effects


def test_asked_again_does_not_grant_more_time() -> None:
    begin = Supervision(frozenset({0, 1}), 10.0)
    state, effects = _after(begin, (Stop(), 100.0), (Stop(), 109.0), (TimePassed(), 109.9))
    assert effects == [Terminate((0, 1))]
    assert next_deadline(state) == 110.0
    state, effects = _after(state, (Ended(0, 0, None, 109.95, b""), 109.95), (TimePassed(), 110.0))
    assert effects[1] == Kill((1,))
    assert isinstance(effects[2], Note)
    assert "rank 1" in effects[2].text


def test_one_bad_end_leaves_the_others_alone() -> None:
    state, effects = _after(Supervision(frozenset({0, 1}), 10.0), (Ended(0, 1, None, 5.0, b""), 5.0))
    assert effects == [Ended(0, 1, None, 5.0, b"")]
    assert state.running == {1}
    assert next_deadline(state) is None


def test_one_may_be_killed_alone() -> None:
    state, effects = _after(Supervision(frozenset({0, 1}), 10.0), (Stop(ranks=(1, 7)), 5.0))
    assert effects == [Kill((1,))]
    assert next_deadline(state) is None


@pytest.mark.parametrize("reason", [InputEnded(), Stop(hard=True)])
def test_an_end_of_the_agent_kills_at_once_and_what_survives_is_told_once(reason: Happening) -> None:
    state, effects = _after(Supervision(frozenset({3}), 10.0), (Stop(), 0.0), (reason, 1.0))
    assert effects == [Terminate((3,)), Kill((3,))]
    state, effects = _after(
        state, (Stop(), 2.0), *((TimePassed(), STUCK_S + late) for late in (0.5, 1.0, 20.0))
    )
    (note,) = effects
    assert isinstance(note, Note)
    assert "rank 3" in note.text


def test_messages_pass_whole() -> None:
    assert read_order(io.BytesIO(frame_of(_ORDER))) == _ORDER
    for stop in (Stop(True), Stop(ranks=(3, 4))):
        assert read_stop(io.BytesIO(frame_of(stop))) == stop
    events = [Started(0, 1), Ended(0, None, 9, 1.5, b"\xff", True), Note("x"), AllEnded()]
    stream = io.BytesIO(b"".join(map(frame_of, events)))
    assert [read_event(stream) for _ in range(5)] == [*events, None]


_EVENTS = (Started(0, 1), Ended(0, None, 9, 1.5, b"\xff", True), Note("x"), AllEnded())
_BODIES = [frame_of(one)[4:] for one in (_ORDER, Stop(True), Stop(ranks=(3, 4)), *_EVENTS)]


@given(st.binary(max_size=200) | changed(_BODIES))
def test_anything_else_is_an_end_or_an_error_of_ours(data: bytes) -> None:
    for read in (read_order, read_stop, read_event):
        for stream in (io.BytesIO(data), io.BytesIO(len(data).to_bytes(4, "little") + data)):
            try:
                message = read(stream)
            except ProtocolError:
                continue
            if message is not None:
                assert read(io.BytesIO(frame_of(message))) == message


@pytest.mark.parametrize(
    "event",
    [
        ["started", 0, 1],
        {"type": "started", "rank": -1, "pid": 5},
        {"type": "ended", "rank": 0, "code": 0, "signal": None, "at": 0.0, "tail": b"x" * 8193},
        {"type": "note", "text": "x" * 4001},
    ],
)
def test_events_are_bounded(event: object) -> None:
    body = msgspec.msgpack.encode(event)
    with pytest.raises(ProtocolError):
        read_event(io.BytesIO(len(body).to_bytes(4, "little") + body))
    with pytest.raises(ProtocolError, match="at most"):
        read_event(io.BytesIO(b"\xff\xff\xff\xff"))


@given(st.frozensets(st.integers(0, 63), min_size=1), st.none() | st.integers(1, 80), st.integers(0, 80))
def test_some_core_is_always_left_to_the_workers(
    available: frozenset[int], cpus: int | None, spare: int
) -> None:
    chosen = chosen_cpus(available, Limits(cpus=cpus, spare_cpus=spare))
    if chosen is None:
        assert spare == 0 or len(available) == 1
        assert cpus is None or cpus >= len(available) or len(available) == 1
    else:
        assert 1 <= len(chosen) < len(available)
        assert chosen < available
        assert len(chosen) == max(1, min(cpus or 99, len(available) - spare))


def test_quiet_spares_one_core() -> None:
    assert chosen_cpus(frozenset(range(8)), QUIET) == frozenset(range(1, 8))


def test_the_kernels_count_of_killed_processes(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert linux.memory_kills(vmstat) is None
    vmstat.write_text("pgfault 5\noom_kill 3\noom_kill_other 9\n")
    assert linux.memory_kills(vmstat) == 3
    vmstat.write_text("pgfault 5\n")
    assert linux.memory_kills(vmstat) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux adopts orphans")
def test_adopted_orphans_are_buried_and_own_children_left_alone() -> None:
    program = """
import os, subprocess, sys, time
from barnraise.agent.warden import linux
linux.adopt_orphans()
own = subprocess.Popen(["sleep", "600"])
parent = subprocess.Popen(["sh", "-c", "sleep 0.1 & echo $!"], stdout=subprocess.PIPE)
orphan = int(parent.communicate()[0])
stat = f"/proc/{orphan}/stat"
while open(stat).read().split()[2] != "Z":
    time.sleep(0.01)
assert int(open(stat).read().split()[3]) == os.getpid()
linux.reap_orphans([own.pid])
assert not os.path.exists(stat)
own.kill()
while open(f"/proc/{own.pid}/stat").read().split()[2] != "Z":
    time.sleep(0.01)
linux.reap_orphans([own.pid])
assert own.wait() == -9
subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"])
assert linux.kill_descendants(60)
assert linux._descendants(os.getpid()) == []
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=environment, timeout=120)


def test_the_mark_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker has it in its environment, where settings are read from too."""
    monkeypatch.setenv("BARNRAISE_WARDEN", "0" * 32)
    load_settings()


class _Kernel:
    """Remembers what a job was asked to do; ``refuses`` names the call that fails."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[tuple[object, ...]] = []
        self._refuses = refuses

    def _answer(self, name: str, *arguments: object) -> int:
        self.calls.append((name, *arguments))
        return int(name != self._refuses)

    def CreateJobObjectW(self, security: None, name: None) -> int:
        return 77 * self._answer("create")

    def SetInformationJobObject(self, job: int, what: int, limits: object, size: int) -> int:
        raw = ctypes.string_at(ctypes.addressof(limits._obj), size)  # type: ignore[attr-defined]
        flags = int.from_bytes(raw[16:20], "little")
        memory = int.from_bytes(raw[112:120], "little")
        return self._answer("limit", job, what, size, flags, memory)

    def AssignProcessToJobObject(self, job: int, process: int) -> int:
        return self._answer("take", job, process)

    def TerminateJobObject(self, job: int, code: int) -> int:
        return self._answer("kill", job)

    def GetCurrentProcess(self) -> int:
        return 5

    def CloseHandle(self, handle: int) -> int:
        return self._answer("close", handle)


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="the layout of 64-bit Windows")
def test_a_job_kills_on_close_and_bounds_memory_where_asked() -> None:
    kernel = _Kernel()
    job = Job(kernel, 1 << 30)
    job.take(9)
    job.take_this_process()
    job.kill()
    job.close()
    job.close()
    assert kernel.calls == [
        ("create",),
        ("limit", 77, 9, 144, 0x2100, 1 << 30),
        ("take", 77, 9),
        ("take", 77, 5),
        ("kill", 77),
        ("close", 77),
    ]


@pytest.mark.parametrize("call", ["create", "limit", "take"])
def test_a_refusal_of_windows_is_an_error_and_leaks_nothing(call: str) -> None:
    kernel = _Kernel(call)
    with pytest.raises(OSError, match="Windows"):
        Job(kernel).take(9)
    assert (("close", 77) in kernel.calls) == (call == "limit")
