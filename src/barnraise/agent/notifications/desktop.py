"""Notices on the desktop: the commands of Linux, macOS and Windows, and how one is run."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from barnraise.agent.notifications.delivery import DELIVERED, TIMEOUT_S, Delivery
from barnraise.agent.notifications.notice import Notice

_APP = "Barnraise"
_APPLE = (
    "on run argv",
    "display notification (item 2 of argv) with title (item 1 of argv)",
    "end run",
)
# Windows shows toasts of registered programs only, and PowerShell is one.
_POWERSHELL = r"{1AC14E77-02E7-4E5D-B744-2EB1AE5198B7}\WindowsPowerShell\v1.0\powershell.exe"
_TOAST = f"""
$ErrorActionPreference = 'Stop'
[Windows.UI.Notifications.ToastNotificationManager,Windows.UI.Notifications,ContentType=WindowsRuntime]
$kind = [Windows.UI.Notifications.ToastTemplateType]::ToastText02
$xml = [Windows.UI.Notifications.ToastNotificationManager]::GetTemplateContent($kind)
$lines = $xml.GetElementsByTagName('text')
$null = $lines.Item(0).AppendChild($xml.CreateTextNode($env:NOTICE_TITLE))
$null = $lines.Item(1).AppendChild($xml.CreateTextNode($env:NOTICE_TEXT))
$toast = [Windows.UI.Notifications.ToastNotification]::new($xml)
[Windows.UI.Notifications.ToastNotificationManager]::CreateToastNotifier('{_POWERSHELL}').Show($toast)
"""


class DesktopCommand(NamedTuple):
    """Program with its arguments, and variables that are added to its environment."""

    words: tuple[str, ...]
    variables: Mapping[str, str]


def desktop_command(platform: str, title: str, text: str) -> DesktopCommand:
    """Return the command that shows a notice; ``platform`` as in ``sys.platform``. Pure.

    Title and text are data in it: no shell and no script reads them as code.
    """
    if platform == "darwin":
        script = [word for line in _APPLE for word in ("-e", line)]
        return DesktopCommand(("osascript", *script, title, text), {})
    if platform == "win32":
        encoded = base64.b64encode(_TOAST.encode("utf-16-le")).decode()
        words = ("powershell.exe", "-NoProfile", "-NonInteractive", "-EncodedCommand", encoded)
        return DesktopCommand(words, {"NOTICE_TITLE": title, "NOTICE_TEXT": text})
    return DesktopCommand(("notify-send", f"--app-name={_APP}", "--", title, _plain_body(text)), {})


def session_variables(environment: Mapping[str, str], exists: Callable[[str], bool]) -> dict[str, str]:
    """Return the address of the user's session bus as a variable, if an agent lacks it. Pure."""
    if environment.get("DBUS_SESSION_BUS_ADDRESS") or not environment.get("XDG_RUNTIME_DIR"):
        return {}
    bus = f"{environment['XDG_RUNTIME_DIR']}/bus"
    return {"DBUS_SESSION_BUS_ADDRESS": f"unix:path={bus}"} if exists(bus) else {}


def missing_program(platform: str) -> str:
    """Return the program that this machine lacks for notices on its desktop; empty if it has it."""
    program = desktop_command(platform, "", "").words[0]
    return "" if shutil.which(program) else program


def show(notice: Notice, platform: str, environment: Mapping[str, str]) -> Delivery:
    """Show a notice on the desktop of this machine."""
    command = desktop_command(platform, f"{_APP}: {notice.title}", notice.text)
    variables = {
        **environment,
        **session_variables(environment, lambda path: Path(path).exists()),
        **command.variables,
    }
    program = command.words[0]
    try:
        done = subprocess.run(
            command.words,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=2 * TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Delivery(f"{program} is not installed", is_final=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Delivery(f"{program} failed: {type(error).__name__}")
    return DELIVERED if done.returncode == 0 else Delivery(f"{program} exited with code {done.returncode}")


def _plain_body(text: str) -> str:
    """Return a text in which notify-send sees no escape, and notification servers of Linux no markup.

    ``\\074`` would become ``<``, and ``\\377`` an error.
    """
    text = text.replace("\\", "\\\\")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
