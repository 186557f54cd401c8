"""Sandbox of this machine: whether one works here, and the command that starts a program in it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from barnraise.core.command import runner
from barnraise.core.errors import RunEnvironmentError
from barnraise.sandbox import bubblewrap, restricted_token, seatbelt
from barnraise.sandbox.inside import PROXY_PORT_VARIABLE
from barnraise.sandbox.spec import SandboxCommand, SandboxSpec, clean_environment, python_roots, renamed
from barnraise.transport.ipc.dial_request import BROKER_VARIABLE

_TRY_S = 30.0
_FIRST_PROCESS = (sys.executable, "-P", "-m", "barnraise.sandbox.inside")
_HOW_TO_INSTALL = "sudo apt install bubblewrap"


class Sandbox(msgspec.Struct, frozen=True):
    """Sandbox of this machine. ``reason``: why there is none."""

    kind: Literal["bubblewrap", "seatbelt", "restricted token", "none"]
    program: str = ""
    version: tuple[int, ...] = ()
    reason: str = ""

    @property
    def is_possible(self) -> bool:
        return self.kind != "none"


@functools.cache
def find_sandbox() -> Sandbox:
    """Return the sandbox that works on this machine; it is tried once in each process."""
    sandbox = _installed()
    if not sandbox.is_possible:
        return sandbox
    with tempfile.TemporaryDirectory(prefix="by-") as directory:
        roots = python_roots(Path(sys.executable))
        spec = SandboxSpec(root=directory, directory="/", writable=(), readable=roots)
        _prepare(spec)
        try:
            # The script's own Python, and what is imported before the script.
            program = (sys.executable, "-P", "-c", "import barnraise.sandbox.proxy")
            wrapped = _wrapped(sandbox, spec, program, clean_environment(os.environ, spec))
        except OSError as error:
            return Sandbox("none", reason=f"a sandbox could not be made: {error}")
        done = runner(_TRY_S, wrapped.environment)(wrapped.command)
    if done.returncode == 0:
        return sandbox
    last_line = (f"{done.stdout}\n{done.stderr}".strip().splitlines() or ["it says nothing"])[-1]
    return Sandbox("none", reason=f"{Path(sandbox.program).name} does not work here: {last_line[:200]}")


def _installed(platform: str = sys.platform) -> Sandbox:
    if platform == "linux":
        program = shutil.which(bubblewrap.PROGRAM)
        if program is None:
            return Sandbox("none", reason=f"bubblewrap is not installed; try: {_HOW_TO_INSTALL}")
        numbers = re.findall(r"\d+", runner(_TRY_S)((program, "--version")).stdout)
        return Sandbox("bubblewrap", program, tuple(map(int, numbers[:3])))
    if platform == "darwin" and os.path.exists(seatbelt.PROGRAM):
        return Sandbox("seatbelt", seatbelt.PROGRAM)
    if platform == "win32":
        return Sandbox("restricted token", sys.executable)
    return Sandbox("none", reason=f"there is none for {platform}")


def sandbox_sentence(*, is_wanted: bool = True, sandbox: Sandbox | None = None) -> str:
    """Return what a person must know of the sandbox before consent to a script. It may take a second."""
    chosen = find_sandbox() if sandbox is None else sandbox
    if not is_wanted:
        return "There is no sandbox, as you chose: the script can do everything that you can do here."
    if chosen.kind == "none":
        return (
            f"No sandbox is possible on this machine ({chosen.reason}). "
            "The script could do everything that you can do here."
        )
    if chosen.kind == "restricted token":
        return (
            "A sandbox keeps the script from your files and from other programs, as far as Windows permits. "
            "It does not limit the network."
        )
    return (
        "A sandbox confines the script: it sees its own folder and the system's programs, "
        "not your files, your processes or your keys. "
        "Of the network it reaches its own run and public web pages only."
    )


def no_sandbox(sandbox: Sandbox) -> RunEnvironmentError:
    """Return the error for a machine on which no sandbox is possible."""
    return RunEnvironmentError(
        f"this machine has no sandbox: {sandbox.reason}",
        hint="Install it, or trust the script with everything that you can do: --no-sandbox",
    )


def sandboxed(
    sandbox: Sandbox,
    spec: SandboxSpec,
    command: Sequence[str],
    base: Mapping[str, str],
    given: Mapping[str, str],
) -> SandboxCommand:
    """Create the script's directories, and return the command that starts it in a sandbox.

    ``base``: the machine's environment, of which little is kept. ``given``: the script's own variables.
    Raise RunEnvironmentError if this machine has no sandbox.
    """
    if not sandbox.is_possible:
        raise no_sandbox(sandbox)
    _prepare(spec)
    first = () if sandbox.kind == "restricted token" else _FIRST_PROCESS
    environment = clean_environment(base, spec) | renamed(given)
    return _wrapped(sandbox, spec, (*first, *command), environment)


def _wrapped(
    sandbox: Sandbox, spec: SandboxSpec, command: Sequence[str], environment: dict[str, str]
) -> SandboxCommand:
    if spec.broker:
        environment[BROKER_VARIABLE] = spec.broker
    if sandbox.kind == "seatbelt":
        port = _free_port()
        environment |= {PROXY_PORT_VARIABLE: str(port), "TMPDIR": spec.temporary}
        return SandboxCommand(seatbelt.seatbelt_command(spec, command, port), environment)
    if sandbox.kind == "restricted token":
        environment["TMPDIR"] = environment["TEMP"] = environment["TMP"] = spec.temporary
        restricted = restricted_token.restricted_command(sandbox.program, spec, command)
        return SandboxCommand(restricted, environment)
    devices = bubblewrap.gpu_devices([entry.path for entry in os.scandir("/dev")])
    wrapped = bubblewrap.bubblewrap_command(
        sandbox.program, spec, command, version=sandbox.version, devices=devices, link_of=_link_of
    )
    return SandboxCommand(wrapped, environment)


def _prepare(spec: SandboxSpec) -> None:
    """Create the script's home and its directory for temporary files."""
    for path in (spec.home, spec.temporary):
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)


def _link_of(name: str) -> str | None:
    path = f"/{name}"
    return os.readlink(path) if os.path.islink(path) else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
