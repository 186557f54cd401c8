"""The sandbox of Windows: a process with a restricted token. It was never run.

A restricted token passes an access check only if its restricting SIDs pass it, too. A user's profile grants
nothing to them, so keys and documents cannot be opened. The script's folders and its Python grant access to
the SID ``RESTRICTED``. The network is not limited. The supervisor's job object ends all processes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from barnraise.core.command import runner
from barnraise.sandbox.spec import SandboxSpec, outermost, script_environment

RESTRICTED = "S-1-5-12"
RESTRICTING_SIDS = (RESTRICTED, "S-1-1-0", "S-1-5-32-545")  # restricted code, the world, users
_DISABLE_MAX_PRIVILEGE = 0x1
_TOKEN_ACCESS = 0x000F01FF  # TOKEN_ALL_ACCESS
_TOKEN_LOGON_SID = 28
_UNICODE_ENVIRONMENT = 0x400
_USE_STANDARD_HANDLES = 0x100
_INFINITE = 0xFFFFFFFF
_GRANT_S = 300.0
_SEPARATOR = "--"


def grant_commands(spec: SandboxSpec) -> tuple[tuple[str, ...], ...]:
    """Return the commands that let a restricted process read and change the script's files. Pure."""
    readable = outermost(spec.readable, forbidden=spec.hidden)
    rights = [(path, "RX") for path in (*readable, *spec.protected)]
    rights += [(path, "M") for path in (*spec.writable, spec.home, spec.temporary)]
    return tuple(_grant(path, f"*{RESTRICTED}:(OI)(CI){right}") for path, right in rights)


def _grant(path: str, right: str) -> tuple[str, ...]:
    return ("icacls", path, "/grant", right, "/T", "/C", "/Q")


def restricted_command(python: str, spec: SandboxSpec, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs ``command`` with a restricted token. Pure."""
    grants = [word for grant in grant_commands(spec) for word in (grant[1], grant[3])]
    return (python, "-P", "-m", "barnraise.sandbox.restricted_token", *grants, _SEPARATOR, *command)


def main(words: list[str]) -> int:
    """Grant access to the named paths, run the command with a restricted token, and return its exit code."""
    place = words.index(_SEPARATOR)
    for path, grant in zip(words[:place:2], words[1:place:2], strict=True):
        done = runner(_GRANT_S)(_grant(path, grant))
        if done.returncode != 0:
            sys.stderr.write(f"barnraise: cannot grant access to {path}: {done.stderr.strip()}\n")
            return 1
    os.environ.update(script_environment(os.environ))  # which the script inherits
    return _run(subprocess.list2cmdline(words[place + 1 :]))


class _SidAndAttributes(ctypes.Structure):
    _fields_ = (("Sid", ctypes.c_void_p), ("Attributes", ctypes.c_uint32))


class _LogonGroups(ctypes.Structure):
    _fields_ = (("GroupCount", ctypes.c_uint32), ("Groups", _SidAndAttributes))


class _StartupInformation(ctypes.Structure):
    _fields_ = (
        ("cb", ctypes.c_uint32),
        ("names", ctypes.c_void_p * 3),
        ("places", ctypes.c_uint32 * 7),
        ("dwFlags", ctypes.c_uint32),
        ("wShowWindow", ctypes.c_uint16),
        ("cbReserved2", ctypes.c_uint16),
        ("lpReserved2", ctypes.c_void_p),
        ("handles", ctypes.c_void_p * 3),
    )


class _ProcessInformation(ctypes.Structure):
    _fields_ = (
        ("hProcess", ctypes.c_void_p),
        ("hThread", ctypes.c_void_p),
        ("dwProcessId", ctypes.c_uint32),
        ("dwThreadId", ctypes.c_uint32),
    )


def _run(command_line: str) -> int:
    library: Any = getattr(ctypes, "WinDLL")  # noqa: B009  # only Windows has it
    advapi, kernel = library("advapi32", use_last_error=True), library("kernel32", use_last_error=True)
    kernel.GetCurrentProcess.restype = kernel.GetStdHandle.restype = ctypes.c_void_p
    token = _restricted_token(advapi, kernel)
    startup = _StartupInformation()
    startup.cb = ctypes.sizeof(startup)
    startup.dwFlags = _USE_STANDARD_HANDLES
    for place, number in enumerate((-10, -11, -12)):
        startup.handles[place] = kernel.GetStdHandle(number)
    process = _ProcessInformation()
    _check(
        advapi.CreateProcessAsUserW(
            *(token, None, ctypes.create_unicode_buffer(command_line), None, None, True),
            *(_UNICODE_ENVIRONMENT, None, None, ctypes.byref(startup), ctypes.byref(process)),
        ),
        "start the script with a restricted token",
    )
    kernel.WaitForSingleObject(ctypes.c_void_p(process.hProcess), _INFINITE)
    code = ctypes.c_uint32()
    _check(kernel.GetExitCodeProcess(ctypes.c_void_p(process.hProcess), ctypes.byref(code)), "read its code")
    return code.value


def _restricted_token(advapi: Any, kernel: Any) -> ctypes.c_void_p:
    """Return a copy of this process's token without privileges, and with the restricting SIDs."""
    own, restricted = ctypes.c_void_p(), ctypes.c_void_p()
    this_process = ctypes.c_void_p(kernel.GetCurrentProcess())
    _check(advapi.OpenProcessToken(this_process, _TOKEN_ACCESS, ctypes.byref(own)), "open this token")
    size = ctypes.c_uint32()
    advapi.GetTokenInformation(own, _TOKEN_LOGON_SID, None, 0, ctypes.byref(size))
    memory = ctypes.create_string_buffer(size.value)
    _check(
        advapi.GetTokenInformation(own, _TOKEN_LOGON_SID, memory, size, ctypes.byref(size)),
        "read the logon session",
    )
    sids = (_SidAndAttributes * (len(RESTRICTING_SIDS) + 1))()
    for place, text in enumerate(RESTRICTING_SIDS):
        sid = ctypes.c_void_p()
        _check(advapi.ConvertStringSidToSidW(text, ctypes.byref(sid)), f"read the SID {text}")
        sids[place].Sid = sid
    # Without the logon session's SID it could not open the window station, and Python would not start.
    sids[len(RESTRICTING_SIDS)].Sid = ctypes.cast(memory, ctypes.POINTER(_LogonGroups)).contents.Groups.Sid
    _check(
        advapi.CreateRestrictedToken(
            *(own, _DISABLE_MAX_PRIVILEGE, 0, None, 0, None, len(sids), sids, ctypes.byref(restricted))
        ),
        "restrict the token",
    )
    return restricted


def _check(succeeded: int, what: str) -> None:
    if not succeeded:
        code = getattr(ctypes, "get_last_error")()  # noqa: B009  # only Windows has it
        raise OSError(f"Windows cannot {what} (error {code})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
