"""Metered connection: whether the system says that traffic costs money."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from barnraise.core.command import runner

METERED_VARIABLE = "BARNRAISE_METERED"  # of a script in a sandbox: a file with METERED if it is so
METERED = "metered"
METERED_EVERY_S = 60.0  # how often to ask the system
_WINDOWS_QUESTION = (
    "[void][Windows.Networking.Connectivity.NetworkInformation,Windows,ContentType=WindowsRuntime];"
    "[Windows.Networking.Connectivity.NetworkInformation]::GetInternetConnectionProfile()"
    ".GetConnectionCost().NetworkCostType"
)

Asked = Callable[[list[str]], str]


def is_metered(platform: str = sys.platform, ask: Asked | None = None) -> bool:
    """Tell whether the system marks the connection as metered.

    Systems that cannot tell (macOS, no NetworkManager) count as unmetered. In a sandbox the system cannot be
    asked; a process outside writes the answer to a file.
    """
    if noted := os.environ.get(METERED_VARIABLE):
        try:
            return Path(noted).read_text(encoding="ascii") == METERED
        except OSError:
            return False
    run_command = ask or _answer
    if platform == "linux":
        lines = run_command(
            ["nmcli", "-t", "-f", "GENERAL.STATE,GENERAL.METERED", "device", "show"]
        ).splitlines()
        is_up = False
        for line in lines:
            name, _, value = line.partition(":")
            if name == "GENERAL.STATE":
                is_up = value.startswith("100")
            elif name == "GENERAL.METERED" and is_up and value.startswith("yes"):
                return True
        return False
    if platform == "win32":
        words = run_command(["powershell", "-NoProfile", "-Command", _WINDOWS_QUESTION]).split()
        return bool(words) and words[-1] in ("Fixed", "Variable")
    return False


def _answer(command: list[str]) -> str:
    environment = {**os.environ, "LC_ALL": "C"}  # nmcli translates its answers
    return runner(5.0, environment)(command).stdout
