"""``barnraise torch``: the right install command for this machine, and what the installed torch can do.

torch is asked in a process of its own: a broken install may crash on import, and must not take us with it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys

import click
import msgspec

from barnraise.cli.terminal import is_terminal, wrapped
from barnraise.cli.waiting import run_visibly, waiting
from barnraise.core.command import TOO_SLOW, runner
from barnraise.core.errors import TorchMissing
from barnraise.core.installation import TESTED_RANGE, is_tested
from barnraise.environments.torch_build import TorchChoice, choose_torch_here

_PROBE_TIMEOUT_S = 120.0
_NEEDS_QUOTES = re.compile(r"[^\w.:/=@%+-]")
_PROBE = """
import json, sys
import torch
import torch.distributed as dist
devices = ["cpu"]
if torch.cuda.is_available():
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
if torch.backends.mps.is_available():
    devices.append("mps")
registered = dist.is_available() and "barnraise" in dist.Backend.backend_list
print(json.dumps({"version": torch.__version__, "devices": devices, "registered": registered}))
"""


class InstallAdvice(msgspec.Struct, frozen=True):
    """Advice on how to install torch on one kind of machine, with the reason.

    ``arguments``: words of the command that installs it, or None if there is no torch for the machine.
    """

    arguments: tuple[str, ...] | None
    why: str

    @property
    def command(self) -> str | None:
        """Return the command as a person types it."""
        if self.arguments is None:
            return None
        return " ".join(f'"{word}"' if _NEEDS_QUOTES.search(word) else word for word in self.arguments)


class TorchProbe(msgspec.Struct, frozen=True):
    """Version and devices that the installed torch reports."""

    version: str
    devices: tuple[str, ...]
    registered: bool


def advise(choice: TorchChoice) -> InstallAdvice:
    """Return the install command for a machine with that choice of builds."""
    if not choice.possible:
        return InstallAdvice(None, choice.why)
    index = ("--index-url", choice.index) if choice.index else ()
    return InstallAdvice((sys.executable, "-m", "pip", "install", f"torch{TESTED_RANGE}", *index), choice.why)


def probe() -> TorchProbe | str:
    """Ask torch in a fresh process. Return a sentence with the reason if torch cannot answer."""
    done = runner(_PROBE_TIMEOUT_S)([sys.executable, "-c", _PROBE])
    if done.returncode == TOO_SLOW:
        return f"importing it took more than {_PROBE_TIMEOUT_S:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last_words = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        return f"importing it failed: {last_words[-1]}"
    return msgspec.json.decode(lines[-1], type=TorchProbe)


def run(*, install: bool, yes: bool) -> int:
    """Show the install command, version, range and devices; with ``install`` install it first.

    The exit code is 0 if torch works here or is not there yet, and 1 if it is broken or was not tested.
    """
    advice = advise(choose_torch_here())
    if install:
        return _install(advice, yes=yes)
    click.echo(f"install:   {advice.command or 'not possible on this machine'}")
    click.echo(f"           ({advice.why})")
    if not _is_installed():
        click.echo(f"installed: no torch for {sys.executable}")
        if advice.arguments is not None:
            click.echo("Next: `barnraise torch --install` runs that command.")
        return 0
    return _report()


def offer_torch(*, yes: bool) -> int:
    """Install torch on a machine that has none, if the user agrees; return the exit code."""
    if _is_installed():
        return 0
    advice = advise(choose_torch_here())
    if advice.arguments is None:
        click.echo(f"This machine cannot train: {advice.why}.")
        return 0
    if not yes and not is_terminal(sys.stdin):
        click.echo("torch is not installed here. Before you train: barnraise torch --install")
        return 0
    click.echo("torch is not installed here, and training needs it.")
    return _install(advice, yes=yes)


def _install(advice: InstallAdvice, *, yes: bool) -> int:
    if advice.arguments is None:
        raise TorchMissing(
            f"torch cannot be installed on this machine: {advice.why}",
            hint="Let this machine vote only: barnraise up --witness",
        )
    if importlib.util.find_spec("pip") is None:
        raise TorchMissing(
            f"{sys.executable} has no pip, which installs torch",
            hint=f'Install pip: "{sys.executable}" -m ensurepip',
        )
    if not yes and not is_terminal(sys.stdin):
        raise TorchMissing("the installation asks first, and there is no terminal", hint="Add --yes.")
    click.echo(wrapped(f"This command installs it ({advice.why}):"))
    click.echo(_wrapped(advice.arguments))
    if not yes and not click.confirm("Install torch now?", default=True):
        click.echo("Nothing was installed. Later: barnraise torch --install")
        return 0
    done = run_visibly((*advice.arguments, *_progress_options()), "Installing torch")
    if done.code != 0:
        raise TorchMissing(
            f"pip ended with code {done.code}, so torch is not installed; it said:\n{done.tail}",
            hint=f"Run the command yourself: {advice.command}",
        )
    importlib.invalidate_caches()
    return _report()


def _wrapped(arguments: tuple[str, ...]) -> str:
    """Return the command in lines that fit a terminal where its words do."""
    return wrapped("  " + " ".join(arguments), indent="    ")


def _progress_options() -> tuple[str, ...]:
    """Return options that make pip print its progress as lines; pip before 24.1 can only leave it out."""
    numbers = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("pip"))
    is_new = numbers is not None and (int(numbers[1]), int(numbers[2])) >= (24, 1)
    return ("--progress-bar", "raw" if is_new else "off")


def _is_installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def _report() -> int:
    with waiting("Starting torch once, to see its devices"):
        installed = probe()
    if isinstance(installed, str):
        click.echo(f"installed: a torch that does not work: {installed}")
        return 1
    tested = is_tested(installed.version)
    verdict = "tested" if tested else f"NOT tested; this version of Barnraise was tested with {TESTED_RANGE}"
    click.echo(f"installed: torch {installed.version} ({verdict})")
    click.echo(f"devices:   {', '.join(installed.devices)}")
    if installed.registered:
        click.echo('backend:   init_process_group("barnraise") is ready')
    else:
        click.echo("backend:   not registered; install Barnraise with pip into this same environment")
    return 0 if tested else 1
