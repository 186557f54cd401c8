"""Disk after a power cut: the writes of a traced process, without those that were never synced."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CALLS = "openat,close,write,pwrite64,ftruncate,fsync,fdatasync,unlink,unlinkat"
_LINE = re.compile(r"^(?:\[pid +\d+\] |\d+ +)?(\w+)\((.*)\) += (-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True)
class Call:
    """System call that succeeded."""

    name: str
    words: tuple[str, ...]
    data: bytes
    result: int


def trace(command: list[str], trail: Path, environment: dict[str, str]) -> list[Call]:
    """Run a command and return its file operations, in order."""
    wrapped = ["strace", "-f", "-xx", "-s", "10000000", "-e", f"trace={_CALLS}", "-o", str(trail), *command]
    subprocess.run(wrapped, env=environment, check=True, capture_output=True, timeout=100)
    calls = []
    for line in trail.read_text().splitlines():
        match = _LINE.match(line)
        if match is None or int(match[3]) < 0:
            continue
        text = _TEXT.search(match[2])
        data = bytes.fromhex(text[1].replace("\\x", "")) if text is not None else b""
        words = tuple(word.strip() for word in _TEXT.sub("", match[2]).split(","))
        calls.append(Call(match[1], words, data, int(match[3])))
    return calls


class Disk:
    """Files as the process sees them, and as the disk holds them."""

    def __init__(self, *, ignore_syncs: bool = False) -> None:
        self._ignore_syncs = ignore_syncs
        self._open: dict[int, str] = {}
        self._live: dict[str, bytearray] = {}
        self._synced: dict[str, bytes] = {}

    def do(self, call: Call) -> None:
        if call.name == "openat":
            self._open[call.result] = call.data.decode()
            return
        if call.name in ("unlink", "unlinkat"):
            self._live.pop(call.data.decode(), None)
            self._synced.pop(call.data.decode(), None)
            return
        path = self._open.get(int(call.words[0])) if call.words[0].isdigit() else None
        if path is None:
            return
        content = self._live.setdefault(path, bytearray())
        if call.name == "close":
            del self._open[int(call.words[0])]
        elif call.name == "pwrite64":
            place = int(call.words[-1], 0)
            content.extend(bytes(max(0, place - len(content))))
            content[place : place + call.result] = call.data[: call.result]
        elif call.name == "ftruncate":
            size = int(call.words[-1], 0)
            content[:] = content[:size].ljust(size, b"\0")
        elif call.name in ("fsync", "fdatasync") and not self._ignore_syncs:
            self._synced[path] = bytes(content)

    def after_a_power_cut(self, room: Path) -> None:
        """Write what is left; SQLite recreates its shared memory file, which holds no data."""
        state = room / "state"
        state.mkdir(parents=True, mode=0o700)
        for path, content in self._synced.items():
            if "/state/" in path and not path.endswith("-shm"):
                (state / Path(path).name).write_bytes(content)
                (state / Path(path).name).chmod(0o600)
