"""Start of a communication process on Windows, where a socket is shared with the id of a process."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from barnraise.collectives import spawn
from barnraise.core.config import Settings


class SharedSocket:
    """A socket of Windows: it is given to a process by its id."""

    def fileno(self) -> int:
        return 7

    def share(self, pid: int) -> bytes:
        return b"shared with %d" % pid


def test_process_of_windows_is_the_interpreter_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The python.exe of a virtual environment starts a child, which would not get the socket."""
    started: dict[str, Any] = {}

    class Stdin(io.BytesIO):
        def close(self) -> None:
            started["sent"] = bytes.fromhex(self.getvalue().decode())

    def start(command: list[str], env: dict[str, str], stdin: int) -> SimpleNamespace:
        started.update(program=command[0], launcher=env["__PYVENV_LAUNCHER__"])
        return SimpleNamespace(pid=4711, stdin=Stdin())

    own, base = r"C:\venv\python.exe", r"C:\python.exe"
    system = SimpleNamespace(platform="win32", executable=own, _base_executable=base)
    monkeypatch.setattr(spawn, "sys", system)
    monkeypatch.setattr(spawn, "subprocess", SimpleNamespace(Popen=start, PIPE=-1))
    spawn._spawn([SharedSocket()], "run", 1, Settings())  # type: ignore[list-item]
    assert started == {"program": base, "launcher": own, "sent": b"shared with 4711"}
