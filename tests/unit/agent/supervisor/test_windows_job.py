"""Windows job objects, through a fake kernel32."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from barnraise.agent.supervisor import process
from barnraise.agent.supervisor.messages import WorkerLimits
from barnraise.agent.supervisor.process import ExitOutcome, windows_outcome
from barnraise.agent.supervisor.windows_job import Job
from barnraise.core.flow.termination import WINDOWS_KILL_CODE
from tests.unit.agent.supervised_workers import worker


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
def test_job_kills_on_close_and_limits_memory() -> None:
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
def test_job_refused_call_raises_and_closes_handle(call: str) -> None:
    kernel = _Kernel(call)
    with pytest.raises(OSError, match="Windows"):
        Job(kernel).take(9)
    assert (("close", 77) in kernel.calls) == (call == "limit")


@pytest.fixture
def process_of_windows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module that starts workers, as Windows imports it."""
    spec = importlib.util.spec_from_file_location("process_of_windows", process.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as windows:
        windows.setattr(sys, "platform", "win32")
        spec.loader.exec_module(module)
    monkeypatch.setattr(module, "sys", SimpleNamespace(platform="win32"))
    return module


def test_worker_runs_only_after_it_is_in_its_job(
    process_of_windows: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The python.exe of a virtual environment starts another process at once, which would be outside."""
    kernel = _Kernel()

    def run(handle: int) -> int:
        return kernel._answer("run", handle)

    def start(command: object, *, creationflags: int, **options: object) -> SimpleNamespace:
        if not creationflags & 0x4:  # CREATE_SUSPENDED
            run(9)
        return SimpleNamespace(pid=4711, _handle=9)

    constants = {"CREATE_NEW_PROCESS_GROUP": 0x200, "DEVNULL": -3, "PIPE": -1, "STDOUT": -2}
    monkeypatch.setattr(process_of_windows, "subprocess", SimpleNamespace(Popen=start, **constants))
    monkeypatch.setattr(process_of_windows, "kernel32", lambda: kernel)
    ntdll = SimpleNamespace(NtResumeProcess=run)
    monkeypatch.setattr(ctypes, "WinDLL", {"ntdll": ntdll}.__getitem__, raising=False)
    process_of_windows.start(worker(tmp_path, "pass"), WorkerLimits(), {})
    assert kernel.calls[-2:] == [("take", 77, 9), ("run", 9)]
    assert kernel.calls.count(("run", 9)) == 1


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(0, (0, None)), (1, (1, None)), (9, (9, None)), (WINDOWS_KILL_CODE, (None, 9)), (0xC000013A, (None, 9))],
)
def test_exit_code_of_windows_tells_a_kill(code: int, outcome: tuple[int | None, int | None]) -> None:
    """Otherwise each worker that we stop would count as a failure of the script."""
    assert windows_outcome(code) == ExitOutcome(*outcome)
