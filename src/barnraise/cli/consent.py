"""The one question that asks a person for consent before code of another person runs here.

Every text in it may come from the sender. So nothing in it commands the terminal, an argument cannot look
like two, and a line of the sender cannot begin where ours begin.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import click

from barnraise.cli.tables import table
from barnraise.cli.terminal import columns, wrapped
from barnraise.core.sanitize import is_printable, printable
from barnraise.core.units import counted, format_size

_MAX_FILES = 12
_MAX_VARIABLES = 24
_MAX_DATA = 16
_MAX_COMMAND = 1500  # characters
_MAX_NAME = 64
_MAX_VALUE = 160
_MAX_PATH = 200
_WIDTH = 80
NO_SANDBOX = "none: the program can do here all that you can do"
# These change which code is loaded, or where programs look for it.
_DANGEROUS = re.compile(
    r"(LD_|DYLD_|PYTHON|PIP_|UV_|GIT_|GCONV_|CONDA_).*|PATH|HOME|ENV|BASH_ENV|SHELL|IFS|.*_PROXY",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class OfferedData:
    """Data set or model of a run: files that are sent, or a path of this machine that is read."""

    name: str
    path: str = ""  # of this machine; empty: the files are sent
    files: int = 0
    bytes: int = 0
    is_model: bool = False
    version: str = ""  # the id that the sender gives a model


@dataclass(frozen=True)
class ClusterReach:
    """Machines of the person's cluster that a program here can reach. ``role``: of this machine there."""

    role: str = ""
    machines: Sequence[str] = ()  # names with their ids


@dataclass(frozen=True, kw_only=True)
class OfferedRun:
    """Everything that a person agrees to. ``sandbox``: a statement about it; empty if there is none.

    ``heading``: names the sender with an id, because a name can be chosen to look like another.
    """

    heading: str
    command: Sequence[str]
    files: Sequence[tuple[str, int]]  # path and bytes; the first ones, if there are many
    file_count: int
    file_bytes: int
    variables: Sequence[tuple[str, str]] = ()
    data: Sequence[OfferedData] = ()
    image: str = ""
    packages: str = ""  # the file that lists them
    package_count: int = 0
    reach: ClusterReach = ClusterReach()
    sandbox: str = ""
    notes: Sequence[str] = ()


def agrees(offered: OfferedRun, question: str, *, yes: bool) -> bool:
    """Show what a person agrees to, and ask. ``yes``: the person has agreed on the command line."""
    click.echo(describe(offered))
    if yes:
        return True
    try:
        return click.confirm(question, default=False)
    except click.Abort:
        click.echo()
        return False


def describe(offered: OfferedRun) -> str:
    """Return the text of the question, without the question itself; no line is longer than 80 columns."""
    width = min(_WIDTH, columns())
    rows = [
        *_labelled("command", _command(offered.command)),
        *_labelled("files", _files(offered)),
        *_labelled("variables", _variables(offered.variables)),
        *_labelled("data", _data(offered.data)),
        *_labelled("image", [printable(offered.image, limit=_MAX_PATH) or "none: it runs in no container"]),
        *_labelled("packages", [_packages(offered)]),
        *_labelled("reaches", [_reach(offered.reach)]),
        *_labelled("sandbox", [offered.sandbox or NO_SANDBOX]),
        *_labelled("note", offered.notes),
    ]
    return f"{wrapped(offered.heading, width)}\n{table(rows, wraps=True, indent='  ', width=width)}"


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [(label if place == 0 else "", line) for place, line in enumerate(lines)]


def _command(command: Sequence[str]) -> list[str]:
    """Return the command, quoted so that one argument cannot look like two."""
    whole = shlex.join(printable(part) for part in ("python", *command))
    lines = [printable(whole, limit=_MAX_COMMAND)]
    if len(whole) > _MAX_COMMAND:
        lines.append(f"NOT ALL OF IT IS SHOWN: it has {len(whole)} characters; --json shows all")
    if not all(map(is_printable, command)):
        lines.append("CAREFUL: it has hidden control characters, shown as ?")
    return lines


def _files(offered: OfferedRun) -> list[str]:
    shown = offered.files[:_MAX_FILES]
    lines = [f"{counted(offered.file_count, 'file')}, {format_size(offered.file_bytes)}"]
    lines += [f"{format_size(size):>9}  {printable(path, limit=_MAX_PATH)}" for path, size in shown]
    rest = offered.file_count - len(shown)
    if rest > 0:
        size = offered.file_bytes - sum(size for _, size in shown)
        lines.append(f"{format_size(size):>9}  in {rest} more")
    return lines


def _variables(variables: Sequence[tuple[str, str]]) -> list[str]:
    """Return the variables, those that change which code is loaded first."""
    ordered = sorted(variables, key=lambda variable: not is_dangerous(variable[0]))
    lines = [_variable(name, value) for name, value in ordered[:_MAX_VARIABLES]]
    rest = ordered[_MAX_VARIABLES:]
    if rest:
        lines.append(f"NOT ALL ARE SHOWN: {len(rest)} more; --json shows all")
    return lines or ["none"]


def _variable(name: str, value: str) -> str:
    text = f"{printable(name, limit=_MAX_NAME)}={printable(value, limit=_MAX_VALUE)}"
    return f"CAREFUL, it can load other code: {text}" if is_dangerous(name) else text


def is_dangerous(name: str) -> bool:
    """Tell whether a variable changes which code programs load, or where they look for it."""
    return _DANGEROUS.fullmatch(name) is not None


def _data(data: Sequence[OfferedData]) -> list[str]:
    lines = []
    for part in data[:_MAX_DATA]:
        name, path = printable(part.name, limit=_MAX_NAME), printable(part.path, limit=_MAX_PATH)
        kind = "model " if part.is_model else ""
        kind += f"called {printable(part.version, limit=_MAX_PATH)}, " if part.version else ""
        what = f"{counted(part.files, 'file')}, {format_size(part.bytes)} are sent to this machine"
        what += ", or copied from its Hugging Face cache if that has the same" if part.is_model else ""
        lines.append(f"{name}: {kind}reads {path} of this machine" if path else f"{name}: {kind}{what}")
    if len(data) > _MAX_DATA:
        lines.append(f"NOT ALL ARE SHOWN: {len(data) - _MAX_DATA} more; --json shows all")
    return lines or ["none"]


def _packages(offered: OfferedRun) -> str:
    if not offered.packages:
        return "none are installed"
    count, source = counted(offered.package_count, "package"), printable(offered.packages, limit=_MAX_PATH)
    return f"{count} of {source} are installed, outside of a sandbox; as wheels only, which runs no code"


def _reach(reach: ClusterReach) -> str:
    if not reach.machines:
        return "your network, as every program of yours; this machine has no cluster"
    names = ", ".join(map(printable, reach.machines))
    if reach.role == "owner":
        return (
            f"this machine is an owner of a cluster with {names}: the program can reach them, and run code "
            "on them, unless it is sandboxed"
        )
    return (
        f"this machine is a guest of a cluster with {names}: the program can reach them over the network, "
        "unless it is sandboxed"
    )
