"""Process of one uv or pip command of a build: its progress, its errors, and the end of its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from barnraise.core.errors import RunEnvironmentError
from barnraise.core.sanitize import printable
from barnraise.core.units import format_size

_TAIL_LINES = 60
_SHOWN_LINES = 8
_LONGEST_LINE = 400
# Lines of pip and uv that show progress.
_PROGRESS = re.compile(
    r"^\s*(Collecting|Downloading|Using cached|Building|Installing|Successfully|Resolved|Prepared|Installed) "
)
_WHEEL = re.compile(
    r"^(?P<verb>Downloading|Using cached) (?:\S*/)?(?P<name>[\w.]+)-(?P<version>\d[^-\s]*)-\S+"
)
_SHARE = re.compile(r"^Progress (?P<done>\d{1,18}) of (?P<total>\d{1,18})$")
_UNREACHABLE = re.compile(
    r"NewConnectionError|Failed to establish a new connection|NameResolutionError|getaddrinfo|dns error"
    r"|Network is unreachable|error sending request|Connection refused|ReadTimeoutError"
)
_FULL = re.compile(r"No space left on device|Errno 28|WinError 112")
_FAILED_PACKAGE = (
    re.compile(r"No matching distribution found for (?P<what>\S+)"),
    re.compile(r"Could not find a version that satisfies the requirement (?P<what>\S+)"),
    re.compile(r"Failed building wheel for (?P<what>\S+)"),
    re.compile(r"Failed to (?:build|download|fetch|install)(?: and build)?:? `(?P<what>[^`]+)`"),
    re.compile(
        r"Because (?:there is no version of )?(?P<what>[\w.=<>~!-]+) (?:was not found|has no|and you)"
    ),
    re.compile(r"Because there is no version of (?P<what>\S+)"),
    re.compile(r"Cannot install (?P<what>.+?) because these package versions have conflicting"),
    re.compile(r"Invalid requirement: (?P<what>.+)"),
    re.compile(r"^\s*(?P<what>[\w.-]+==\S+) from .*\n\s*Expected sha256", re.MULTILINE),
)
if sys.platform == "win32":
    _APART_ON_WINDOWS = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
else:
    _APART_ON_WINDOWS = 0


class BuildStep(msgspec.Struct, frozen=True):
    """Build command, and the variables that it needs in addition to the machine's own."""

    command: tuple[str, ...]
    variables: Mapping[str, str] = {}


class BuildProgress:
    """Reader of the output of pip and uv that keeps what is worth showing. Pure."""

    def __init__(self) -> None:
        self._current = ""

    def words(self, line: str) -> str:
        """Return a short text about progress, or an empty one."""
        share = _SHARE.match(line.strip())
        if share is not None:
            done, total = format_size(int(share["done"])), format_size(int(share["total"]))
            return f"{self._current}: {done} of {total}" if self._current else f"{done} of {total}"
        if _PROGRESS.match(line) is None:
            return ""
        text = line.strip()
        wheel = _WHEEL.match(text)
        if wheel is not None:
            text = f"{wheel['verb']} {wheel['name']} {wheel['version']}{text[wheel.end() :]}"
        self._current = re.sub(r" \([^)]*\)$", "", text)
        return text


async def run_step(
    step: BuildStep,
    source: str,
    folder: Path,
    environment: Mapping[str, str],
    on_progress: Callable[[str], None],
    *,
    every_line: bool = False,
) -> None:
    """Run a build command; after an error or a cancellation no process of it is left."""

    lines = BuildProgress()

    def on_line(line: str) -> None:
        words = line.strip() if every_line else lines.words(line)
        if words:
            on_progress(words)

    try:
        code, tail = await run_build_command(step.command, folder, environment, on_line)
    except OSError as error:
        raise RunEnvironmentError(
            f"cannot build the environment from {source}: {step.command[0]} cannot be started ({error})",
            hint="Install it again, or use what is installed: `--env agent`.",
        ) from None
    if code != 0:
        raise failure(source, tail, code)


async def run_build_command(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
) -> tuple[int, list[str]]:
    """Return the exit code and the last lines of output; raise OSError if the command cannot be started.

    It uses a process and a thread. The agent's event loop has no asyncio subprocesses on Windows.
    """
    process = _spawn(command, folder, environment)
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        async for line in _lines(_parts(process)):
            tail.append(line)
            on_line(line)
        code = await asyncio.to_thread(process.wait)
    finally:
        await _kill(process)
    return code, list(tail)


def _spawn(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
        creationflags=_APART_ON_WINDOWS,
    )


async def _parts(process: subprocess.Popen[bytes]) -> AsyncIterator[bytes]:
    """Yield output as it arrives, read by a daemon thread: a stray child may hold the pipe open."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as stream, contextlib.suppress(RuntimeError):  # the loop is closed
            while part := stream.read(65536):
                loop.call_soon_threadsafe(inbox.put_nowait, part)
            loop.call_soon_threadsafe(inbox.put_nowait, b"")

    threading.Thread(target=read, daemon=True).start()
    while part := await inbox.get():
        yield part


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the lines of the output, cut to a readable length."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        rest = rest[-65536:]
        for line in whole:
            if line.strip():
                yield _shown(line)
    if rest.strip():
        yield _shown(rest)


def _shown(line: bytes) -> str:
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line.decode("utf-8", "replace"))
    return printable(text, instead=" ").rstrip()[:_LONGEST_LINE]


async def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, unless it has exited."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
        if sys.platform == "win32":
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(process.wait)


def failure(source: str, tail: list[str], code: int) -> RunEnvironmentError:
    """Return an error that says what went wrong and what to do, from the last output of pip or uv."""
    text = "\n".join(tail)
    matches = (pattern.search(text) for pattern in _FAILED_PACKAGE)
    package = next((match["what"].strip("`'\",.") for match in matches if match), None)
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if _FULL.search(text):
        why, hint = "the disk is full", "Free disk space on this machine, then run again."
    elif _UNREACHABLE.search(text):
        why = f"{package or 'a package'} could not be fetched"
        hint = "Check that this machine reaches the internet or your package index, then run again."
    elif "ensurepip" in text:
        why = "this Python cannot create environments"
        hint = "Install its venv package (on Debian: `sudo apt install python3-venv`) or uv, then run again."
    elif package is not None:
        why = f"{package} could not be installed for {here}"
        hint = f"Correct or remove {package} in {source}, or use what is installed: `--env agent`."
    else:
        why = f"the command exited with code {code} on {here}"
        hint = f"Correct {source} by the lines above, or use what is installed: `--env agent`."
    last = "".join(f"\n    {line}" for line in tail[-_SHOWN_LINES:])
    return RunEnvironmentError(f"cannot build the environment from {source}: {why}{last}", hint=hint)
