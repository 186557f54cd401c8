"""What one Python has of the packages that a script imports: of the agent's own, or of another one.

Nothing is imported for it: finders and metadata are asked. These facts come from other machines too, so that
every text and list has a bound.
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
    """An import name that can be imported, and who brings it in which version, where that is known."""

    name: Word
    distribution: Word | None = None
    version: Word | None = None


class InstalledPackages(msgspec.Struct, frozen=True, kw_only=True):
    """What one Python has; ``os`` and ``arch`` are the names that ``platform`` gives them."""

    python: Word
    implementation: Word
    os: Word
    arch: Word
    executable: Annotated[str, Meta(max_length=1024)] = ""
    torch: Word | None = None
    packages: Annotated[tuple[Package, ...], Meta(max_length=MOST_NAMES)] = ()
    missing: Annotated[tuple[Word, ...], Meta(max_length=MOST_NAMES)] = ()

    def package(self, name: str) -> Package | None:
        return next((each for each in self.packages if each.name == name), None)


def own_packages(names: Iterable[str]) -> InstalledPackages:
    """What this process's Python has; takes some tenths of a second if something was installed meanwhile."""
    return msgspec.convert(package_probe.probe(_bounded(names), _distributions()), InstalledPackages)


async def packages_of(
    python: Path, names: Iterable[str], *, deadline_s: float = _DEADLINE_S
) -> InstalledPackages:
    """What another Python of this machine has, asked in a process of it."""
    # Our own folder must not be searched, hence -P.
    command = (str(python), "-P", package_probe.__file__)
    hint = f'Start it by hand, and repair or replace it if that fails: "{python}" -c "import sys"'
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
    """What a command says that runs ``package_survey`` somewhere; RunEnvironmentError about ``whose``.

    Threads instead of asyncio's own subprocesses, which the agent's loop does not have on Windows.
    """

    def failed(why: str) -> RunEnvironmentError:
        return RunEnvironmentError(f"{whose} could not be asked for its packages: {why}", hint=hint)

    try:
        process = _spawn(command, environment)
    except OSError as error:
        raise failed(f"it cannot be started ({error})") from None
    try:
        async with asyncio.timeout(deadline_s):
            out, complaints = await _answer(process, json.dumps(_bounded(names)).encode())
    except TimeoutError:
        raise failed(f"it did not answer within {deadline_s:g} s") from None
    finally:
        if process.poll() is None:
            process.kill()
        await asyncio.to_thread(process.wait)
    lines = out.splitlines()
    if process.returncode != 0 or not lines:
        words = complaints.decode("utf-8", "replace").strip().splitlines()
        raise failed(words[-1][:200] if words else f"it ended with {process.returncode}")
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
    """What it says and what it complains of, each only to its last part; then it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    _, out, complaints = await asyncio.gather(
        asyncio.to_thread(_ask, process.stdin, question),
        asyncio.to_thread(_end_of, process.stdout),
        asyncio.to_thread(_end_of, process.stderr),
    )
    await asyncio.to_thread(process.wait)
    return out, complaints


def _ask(stream: IO[bytes], question: bytes) -> None:
    with contextlib.suppress(OSError), stream:  # it ended early, and says why
        stream.write(question)


def _end_of(stream: IO[bytes]) -> bytes:
    kept = b""
    with stream:
        while part := stream.read(65536):
            kept = (kept + part)[-_LARGEST_REPORT:]
    return kept


def _bounded(names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if 0 < len(name) <= 128][:MOST_NAMES]


_known: tuple[tuple[tuple[str, int], ...], Mapping[str, Sequence[str]]] | None = None


def _distributions() -> Mapping[str, Sequence[str]]:
    """Who brings which import name; read anew only when a folder of the search path has changed."""
    global _known
    places = package_probe.search_places()
    if _known is None or _known[0] != places:
        _known = (places, importlib.metadata.packages_distributions())
    return _known[1]
