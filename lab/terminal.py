"""A shell at a pseudo terminal in a host, as a person uses it: what is typed and printed, with the time."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from lab.hosts import Host
from lab.namespaces import LabError, inside

ROWS, COLUMNS = 40, 80
# The shell prints marks that terminals do not show: the last exit code before a prompt, and its end.
_MARK = re.compile(r"\x1b\]133;(?:D;(\d+)|B)\x07")
_CODE_COMMAND = r'printf "\033]133;D;%s\007" $?'
_PROMPT_END = r"\[\e]133;B\a\]"
_ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[=>()][A-Z0-9]?")
_READ_BYTES = 65536
_PROMPT_S = 60.0
_LOOK_S = 0.2
_DRAIN_S = 5.0


@dataclass(frozen=True)
class Printed:
    """Text that appeared at a moment of the monotonic clock."""

    at_s: float
    text: str


@dataclass
class TypedCommand:
    """A command that was typed, and what was printed until the next prompt."""

    line: str
    begin_s: float
    printed: list[Printed] = field(default_factory=list)
    end_s: float | None = None
    code: int | None = None

    @property
    def output(self) -> str:
        """Return all lines on the screen, the typed one first. A line that was redrawn is there once."""
        screen = Screen()
        screen.show("".join(part.text for part in self.printed))
        return "\n".join(screen.lines)


class Terminal:
    """A shell in a host. ``variables`` is its whole environment, apart from the prompt and the terminal."""

    def __init__(self, host: Host, variables: Mapping[str, str], folder: Path) -> None:
        import fcntl
        import pty
        import termios

        self.host = host
        self.begin_s = time.monotonic()
        self.printed: list[Printed] = []
        self.commands: list[TypedCommand] = []
        self._rest = ""
        self._can_type = False
        self._close_by: float | None = None
        self._changed = threading.Condition()
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        # The kernel discards output at Ctrl-C, and may discard even what a program prints in answer to it.
        modes = termios.tcgetattr(theirs)
        modes[3] |= termios.NOFLSH
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        self._shell = subprocess.Popen(
            inside(host.namespace, ["bash", "--norc", "--noprofile", "-i"], host.host_name, host.groups),
            env={
                **variables,
                "TERM": "xterm",
                "PS1": f"{host.host_name or host.name}$ {_PROMPT_END}",
                "PROMPT_COMMAND": _CODE_COMMAND,
                "HISTFILE": "/dev/null",
            },
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._wait(lambda: self._can_type, _PROMPT_S, "the first prompt")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def type(self, line: str) -> TypedCommand:
        """Type a command, and return at once."""
        if self.commands and self.commands[-1].code is None:
            raise LabError(f"{self.commands[-1].line!r} has not ended, so {line!r} cannot be typed")
        self._wait(lambda: self._can_type, _PROMPT_S, "the prompt")
        command = TypedCommand(line, time.monotonic())
        with self._changed:
            self._can_type = False
            self.commands.append(command)
        self.press(f"{line}\n")
        return command

    def press(self, keys: str) -> None:
        """Send keys, such as an answer to a question or Ctrl-C ("\\x03")."""
        os.write(self._ours, keys.encode())

    def run(self, line: str, timeout: float = 120.0) -> TypedCommand:
        """Type a command, and wait for the next prompt."""
        command = self.type(line)
        self.wait(command, timeout)
        return command

    def wait(self, command: TypedCommand, timeout: float = 120.0) -> int:
        """Wait until a command has ended, and return its exit code."""
        self._wait(lambda: command.code is not None, timeout, f"the end of {command.line!r}")
        assert command.code is not None
        return command.code

    def until(self, command: TypedCommand, pattern: str, timeout: float = 120.0) -> re.Match[str]:
        """Wait until the pattern was printed; the command may have ended then."""
        matches: list[re.Match[str]] = []

        def look() -> bool:
            text = "".join(part.text for part in command.printed)
            match = re.search(pattern, plain(text).replace("\r\n", "\n"), re.MULTILINE)
            if match is not None:
                matches.append(match)
            return match is not None or command.code is not None

        self._wait(look, timeout, f"{pattern!r} in {command.line!r}")
        if not matches:
            raise LabError(f"{command.line!r} ended without {pattern!r}:\n{command.output}")
        return matches[0]

    def close(self) -> None:
        """End the shell and what runs in it in the foreground."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGHUP)
        try:
            self._shell.wait(10)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()
        # The number of a closed descriptor is used again: then a reader that is left would read there.
        self._close_by = time.monotonic() + _DRAIN_S
        self._reader.join()
        os.close(self._ours)

    def _wait(self, truth: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(truth, timeout):
                last = self.commands[-1].output if self.commands else ""
                raise LabError(f"waited {timeout:g} s in vain for {what} on {self.host}:\n{last}")

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            try:
                has_more = bool(select.select([self._ours], [], [], _LOOK_S)[0])
                # What was started in the shell may hold the terminal for long, and print.
                if self._close_by is not None and (not has_more or time.monotonic() > self._close_by):
                    return
                data = os.read(self._ours, _READ_BYTES) if has_more else None
            except OSError:  # the shell has ended
                return
            if data is None:
                continue
            if not data:
                return
            with self._changed:
                self._take(decoder.decode(data), time.monotonic())
                self._changed.notify_all()

    def _take(self, text: str, now: float) -> None:
        text = self._rest + text
        # A mark may come in two parts.
        cut = text.rfind("\x1b")
        is_split = cut >= 0 and not _ESCAPE.match(text, cut) and len(text) - cut < 20
        self._rest = text[cut:] if is_split else ""
        text = text[:cut] if is_split else text
        place = 0
        for mark in _MARK.finditer(text):
            self._show(text[place : mark.start()], now)
            place = mark.end()
            command = self.commands[-1] if self.commands else None
            if mark[1] is None:
                self._can_type = True
            elif command is not None and command.code is None:
                command.code, command.end_s = int(mark[1]), now
        self._show(text[place:], now)

    def _show(self, text: str, now: float) -> None:
        if not text:
            return
        self.printed.append(Printed(now, text))
        if self.commands and self.commands[-1].code is None:
            self.commands[-1].printed.append(Printed(now, text))


def plain(text: str) -> str:
    """Return the text without colours and movements of the cursor."""
    return _ESCAPE.sub("", text)


class Screen:
    """Rows of text as a terminal shows them, however often programs redraw them. Rows have no end."""

    def __init__(self) -> None:
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0
        self.touched: set[int] = set()  # rows that were written to; the reader may clear it

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def show(self, text: str) -> None:
        """Print a text at the cursor."""
        place = 0
        while place < len(text):
            escape = _ESCAPE.match(text, place)
            if escape is not None:
                self._move(escape)
                place = escape.end()
            else:
                self._put(text[place])
                place += 1

    def _put(self, letter: str) -> None:
        if letter == "\n":
            self._row += 1
            if self._row == len(self._rows):
                self._rows.append([])
        elif letter == "\r":
            self._column = 0
        elif letter == "\b":
            self._column = max(0, self._column - 1)
        elif letter.isprintable():
            row = self._rows[self._row]
            row.extend(" " * (self._column + 1 - len(row)))
            row[self._column] = letter
            self._column += 1
            self.touched.add(self._row)

    def _move(self, escape: re.Match[str]) -> None:
        """Move the cursor, or erase a part of its row."""
        numbers = escape[1] or ""
        count = int(numbers) if numbers.isdigit() else 1
        match escape[2]:
            case "A":
                self._row = max(0, self._row - count)
            case "B":
                self._row = min(len(self._rows) - 1, self._row + count)
            case "C":
                self._column += count
            case "D":
                self._column = max(0, self._column - count)
            case "G":
                self._column = count - 1
            case "K":
                row = self._rows[self._row]
                row[:] = [] if numbers == "2" else row[: self._column]


def _own_terminal() -> None:
    import fcntl
    import termios

    # A caller in the background may ignore the keys of its own terminal; a new shell must not.
    for key in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(key, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
