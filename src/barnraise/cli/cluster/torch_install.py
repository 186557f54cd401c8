"""``barnraise torch``: the right install command for this machine, and what the installed torch can do.

torch is asked in a process of its own: a broken install may crash on import, and must not take us with it.
"""

from __future__ import annotations

import importlib.util
import sys

import click
import msgspec

from barnraise.core.command import TOO_SLOW, runner
from barnraise.core.installation import TESTED_RANGE, is_tested
from barnraise.environments.torch_build import TorchChoice, choose_torch_here

_PROBE_TIMEOUT_S = 120.0
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
    """Advice on how to install torch on one kind of machine, with the reason."""

    command: str | None
    why: str


class TorchProbe(msgspec.Struct, frozen=True):
    """Version and devices that the installed torch reports."""

    version: str
    devices: tuple[str, ...]
    registered: bool


def advise(choice: TorchChoice) -> InstallAdvice:
    """Return the install command for a machine with that choice of builds."""
    if not choice.possible:
        return InstallAdvice(None, choice.why)
    command = f'"{sys.executable}" -m pip install "torch{TESTED_RANGE}"'
    return InstallAdvice(f"{command} --index-url {choice.index}" if choice.index else command, choice.why)


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


def run() -> int:
    """Print command, version, range and devices; 0 if a tested torch works here, else 1."""
    advice = advise(choose_torch_here())
    click.echo(f"install:   {advice.command or 'not possible on this machine'}")
    click.echo(f"           ({advice.why})")
    if importlib.util.find_spec("torch") is None:
        click.echo(f"installed: no torch for {sys.executable}")
        return 1
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
