"""Writes the file and runs the commands of an installation, and keeps account of each."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from barnraise.core.command import Run
from barnraise.core.errors import AgentError


class InstallTransaction:
    """Record of all changes that one command made to the system, in order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.wrote: list[str] = []
        self.deleted: list[str] = []
        self.ran: list[str] = []

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command that changes nothing; it is not recorded."""
        return self._run(command)

    def may(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command that changes something and may fail."""
        self.ran.append(shlex.join(command))
        return self._run(command)

    def must(self, *command: str, hint: str) -> None:
        """Run a command, and raise AgentError with its output if it fails."""
        done = self.may(*command)
        if done.returncode != 0:
            words = " ".join((done.stderr or done.stdout).split()) or f"it ended with {done.returncode}"
            raise AgentError(f"`{shlex.join(command)}` failed: {words[:500]}", hint=hint)

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file for this user alone. Raise AgentError if it exists."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600
            )
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except FileExistsError as error:
            raise installed_already(path) from error
        except OSError as error:
            raise AgentError(
                f"{path} cannot be written: {error.strerror}", hint="Make its directory writable for you."
            ) from error
        self.wrote.append(str(path))

    def delete(self, path: Path) -> None:
        if path.exists():
            path.unlink()
            self.deleted.append(str(path))


def installed_already(path: Path) -> AgentError:
    return AgentError(
        f"the service is installed already: {path}",
        hint="See it: barnraise service status. To replace it: barnraise service remove, then install.",
    )


def not_installed(path: Path) -> AgentError:
    return AgentError(
        f"the service is not installed: there is no {path}", hint="Install it: barnraise service install"
    )
