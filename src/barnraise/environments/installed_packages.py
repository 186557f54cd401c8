"""Installed packages of a Python, of those that a script imports.

Nothing is imported: the import finders and the package metadata are queried. The facts also come from other
machines, so that every text and list has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated

import msgspec
from msgspec import Meta

from barnraise.core.errors import RunEnvironmentError
from barnraise.environments import package_probe
from barnraise.topology.devices import Word

MOST_NAMES = 1024
_DEADLINE_S = 60.0
_LARGEST_REPORT = 1024 * 1024
if sys.platform == "win32":
    _HIDDEN_ON_WINDOWS = subprocess.CREATE_NO_WINDOW
else:
    _HIDDEN_ON_WINDOWS = 0


class Package(msgspec.Struct, frozen=True):
    """Import name that is available, with its distribution and version if known."""

    name: Word
    distribution: Word | None = None
    version: Word | None = None


class InstalledPackages(msgspec.Struct, frozen=True, kw_only=True):
    """Packages of one Python; ``os`` and ``arch`` use the names of ``platform``."""

    python: Word
    implementation: Word
    os: Word
    arch: Word
    executable: Annotated[str, Meta(max_length=1024)] = ""
    torch: Word | None = None
    packages: Annotated[tuple[Package, ...], Meta(max_length=MOST_NAMES)] = ()
    missing: Annotated[tuple[Word, ...], Meta(max_length=MOST_NAMES)] = ()

    def package(self, name: str) -> Package | None:
        """Return the package with this import name, or None."""
        return next((each for each in self.packages if each.name == name), None)


def own_packages(names: Iterable[str]) -> InstalledPackages:
    """Return the packages of this process's Python; slower after an installation, by some tenths of a
    second.
    """
    return msgspec.convert(package_probe.probe(_bounded(names), _distributions()), InstalledPackages)


async def packages_of(
    python: Path, names: Iterable[str], *, deadline_s: float = _DEADLINE_S
) -> InstalledPackages:
    """Return the packages of another Python on this machine, queried in a process of it."""
    # Our own folder must not be searched, hence -P.
    command = (str(python), "-P", package_probe.__file__)
    hint = f'Start it by hand, and reinstall it if that fails: "{python}" -c "import sys"'
    return await query_packages(
        command, names, whose=f"the Python at {python}", hint=hint, deadline_s=deadline_s
    )


async def query_packages(
    command: Sequence[str],
    names: Iterable[str],
    *,
    whose: str,
    hint: str,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = _DEADLINE_S,
) -> InstalledPackages:
    """Run a command that starts ``package_probe``, and return its answer.

    Raise RunEnvironmentError that names ``whose`` packages were asked for. It uses threads, because the
    agent's event loop has no asyncio subprocesses on Windows.
    """

    def failed(why: str) -> RunEnvironmentError:
        return RunEnvironmentError(f"{whose} did not report its packages: {why}", hint=hint)

    try:
        process = _spawn(command, environment)
    except OSError as error:
        raise failed(f"it cannot be started ({error})") from None
    try:
        async with asyncio.timeout(deadline_s):
            out, errors = await _answer(process, json.dumps(_bounded(names)).encode())
    except TimeoutError:
        raise failed(f"it did not answer within {deadline_s:g} s") from None
    finally:
        if process.poll() is None:
            process.kill()
        await asyncio.to_thread(process.wait)
    lines = out.splitlines()
    if process.returncode != 0 or not lines:
        error_lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise failed(error_lines[-1][:200] if error_lines else f"it exited with code {process.returncode}")
    try:
        return msgspec.json.decode(lines[-1], type=InstalledPackages)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise failed(f"its answer cannot be read ({error})") from None


def _spawn(command: Sequence[str], environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        creationflags=_HIDDEN_ON_WINDOWS,
    )


async def _answer(process: subprocess.Popen[bytes], question: bytes) -> tuple[bytes, bytes]:
    """Return the last part of standard output and of standard error, after the process has exited."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    _, out, errors = await asyncio.gather(
        asyncio.to_thread(_ask, process.stdin, question),
        asyncio.to_thread(_last_part, process.stdout),
        asyncio.to_thread(_last_part, process.stderr),
    )
    await asyncio.to_thread(process.wait)
    return out, errors


def _ask(stream: IO[bytes], question: bytes) -> None:
    with contextlib.suppress(OSError), stream:  # it ended early, and says why
        stream.write(question)


def _last_part(stream: IO[bytes]) -> bytes:
    kept = b""
    with stream:
        while part := stream.read(65536):
            kept = (kept + part)[-_LARGEST_REPORT:]
    return kept


def _bounded(names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if 0 < len(name) <= 128][:MOST_NAMES]


_known: tuple[tuple[tuple[str, int], ...], Mapping[str, Sequence[str]]] | None = None


def _distributions() -> Mapping[str, Sequence[str]]:
    """Return the distributions of each import name; cached until a folder of the search path changes."""
    global _known
    places = package_probe.search_places()
    if _known is None or _known[0] != places:
        _known = (places, importlib.metadata.packages_distributions())
    return _known[1]
