"""The program that runs containers, Docker or Podman: which one works here, and how it is called."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from barnraise.core.command import NOT_FOUND, runner
from barnraise.core.errors import RunEnvironmentError
from barnraise.environments.build_process import run_build_command

STATE_LABEL = "barnraise.state"
SHOWN_LINES = 4
_NOTE_NAME = "containers"  # file in the state directory: the engine whose containers may be left over
_ROOT = Path(os.sep)
_MEMORY = Path("/dev/shm")  # noqa: S108  # private files with names of ours
_VARIABLES = ".variables"
_SHORT_S = 30.0
_ALREADY_GONE = re.compile(r"no such container|already in progress", re.IGNORECASE)

_log = logging.getLogger(__name__)

OnProgress = Callable[[str], None]


class ContainerEngine(msgspec.Struct, frozen=True):
    """A container engine by its client program; one that is called docker may be Podman."""

    program: str
    podman: bool = False
    rootless: bool = False


def parse_info(program: str, info: str) -> ContainerEngine:
    """Return the engine that the output of ``info`` describes; Podman often has Docker's name. Pure."""
    podman = re.search(r"^\s*(conmon|buildahVersion):", info, re.MULTILINE) is not None
    rootless = re.search(r"^\s*rootless(: true)?\s*$", info, re.MULTILINE) is not None
    return ContainerEngine(program, podman, rootless)


async def choose_engine() -> ContainerEngine:
    """Return the first engine that works, Docker before Podman; raise RunEnvironmentError if none does."""
    programs = [program for program in map(shutil.which, ("docker", "podman")) if program is not None]
    for program in programs:
        info = await output_of(program, "info")
        if info is not None:
            return parse_info(program, info)
    if not programs:
        raise RunEnvironmentError(
            "this machine has neither Docker nor Podman on its path",
            hint="Install one (for example: `sudo apt install podman`) and restart the agent, or leave this "
            "machine out with `--on`.",
        )
    raise RunEnvironmentError(
        f"{programs[0]} is installed, but it is not running or this user may not use it",
        hint=f"Start it and let this user use it until this succeeds: {Path(programs[0]).name} info",
    )


def note_engine(state: Path, engine: ContainerEngine) -> None:
    """Write down which engine may have containers of this state directory, for `remove_leftovers`."""
    (state / _NOTE_NAME).write_text(engine.program, encoding="utf-8")


async def output_of(program: str, *words: str) -> str | None:
    """Return the output of a short command, or None if the command fails or times out."""
    lines: list[str] = []
    try:
        async with asyncio.timeout(_SHORT_S):
            code, _ = await run_build_command((program, *words), _ROOT, os.environ, lines.append)
    except (OSError, TimeoutError):
        return None
    return "\n".join(lines) if code == 0 else None


async def run_program(
    command: Sequence[str],
    environment: Mapping[str, str],
    deadline_s: float,
    what: str,
    on_line: OnProgress = lambda _: None,
) -> tuple[int, list[str]]:
    """Return exit code and lines of a command; raise RunEnvironmentError if it cannot start or times out.

    ``what`` names the work in the error.
    """
    try:
        async with asyncio.timeout(deadline_s):
            return await run_build_command(command, _ROOT, environment, on_line)
    except TimeoutError:
        raise RunEnvironmentError(
            f"{what} took longer than {deadline_s:g} s",
            hint="Try it by hand on this machine, then run again.",
        ) from None
    except OSError as error:
        raise RunEnvironmentError(f"{what} failed: {command[0]} cannot be started ({error})") from None


def remove_containers(program: str, names: Sequence[str]) -> bool:
    """Remove containers by name, running or not; return True if none of them is left."""
    done = runner(_SHORT_S)((program, "rm", "--force", *names))
    output = "" if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"
    failures = [line for line in output.splitlines() if line not in names and not _ALREADY_GONE.search(line)]
    if failures:
        _log.warning("cannot remove containers %s: %s", ", ".join(names), failures[-1])
    return not failures


def variables_file(state: Path, private_dir: Path, name: str) -> Path:
    """Return the file of a container's variables: in memory, because values of --set are on no disk."""
    tag = hashlib.sha256(str(state).encode()).hexdigest()[:12]  # to find the files of one agent again
    return (_MEMORY if _MEMORY.is_dir() else private_dir.parent) / f"{name}.{tag}{_VARIABLES}"


def remove_leftovers(state: Path) -> None:
    """Remove the containers of an earlier, perhaps killed, agent with this state directory; may block."""
    pattern = variables_file(state, state, "*").name
    for file in (*_MEMORY.glob(pattern), *state.glob(f"runs/*/*/{pattern}")):
        file.unlink(missing_ok=True)
    note = state / _NOTE_NAME
    try:
        program = note.read_text(encoding="utf-8")
    except FileNotFoundError:
        return  # no container was ever started
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("cannot look for containers of an earlier agent: %s", error)
        return
    command = (program, "ps", "--all", "--quiet", "--filter", f"label={STATE_LABEL}={state}")
    done = runner(_SHORT_S)(command)
    if done.returncode == NOT_FOUND:
        return  # the engine is gone
    names = done.stdout.split()
    if done.returncode != 0:
        output = f"{done.stdout}\n{done.stderr}".strip()
        _log.warning("cannot look for containers of an earlier agent: %s", output[-200:])
    elif not names or remove_containers(program, names):
        note.unlink(missing_ok=True)
