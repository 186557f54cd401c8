"""Spec of a sandbox: which paths of its run a script may read and write, and its variables."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

import barnraise

HOME_NAME = "home"  # in the writable directory: the home directory of the script
TEMPORARY_NAME = "tmp"
_OWN_NAMES = ("HOME", "TMPDIR", "USER", "LOGNAME")
_GIVEN = "BARNRAISE_GIVEN_"  # prefix of the script's own variables on their way into the sandbox
_DEPENDENCIES = ("msgspec", "psutil", "cryptography", "httpx", "numpy", "torch")
_KEPT_NAMES = frozenset(
    {"PATH", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR", "SYSTEMROOT", "PYTHONUNBUFFERED"}
)
_KEPT_PREFIXES = (
    "LC_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "PYTORCH_",
    "TORCH_",
    "TQDM_",
)


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a sandbox. Everything that is not named here does not exist in it.

    ``root``: the directory for the script's home and temporary files. ``writable``: what it may change.
    ``protected``: parts of the writable directories that it may only read. ``readable``: further files.
    ``hidden``: directories that are not shown even inside of the system's. ``broker``: the socket file of the
    broker in a directory that is named, too; it is the only way to a network.
    """

    root: str
    directory: str
    writable: tuple[str, ...]
    protected: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    broker: str = ""

    @property
    def home(self) -> str:
        return str(Path(self.root, HOME_NAME))

    @property
    def temporary(self) -> str:
        return str(Path(self.root, TEMPORARY_NAME))


class SandboxCommand(msgspec.Struct, frozen=True):
    """Command that starts a program in a sandbox, and its whole environment.

    The program that makes the sandbox has the same environment, and is not confined itself. So the script's
    own variables have other names there, and cannot load code into it.
    """

    command: tuple[str, ...]
    environment: dict[str, str]


def clean_environment(base: Mapping[str, str], spec: SandboxSpec) -> dict[str, str]:
    """Return the few variables of the machine that a script gets.

    The others may hold credentials, so unknown ones are left out.
    """
    kept = {
        name: value for name, value in base.items() if name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES)
    }
    own = {"HOME": spec.home, "TMPDIR": "/tmp", "USER": "barnraise", "LOGNAME": "barnraise"}
    source = str(Path(barnraise.__file__).parents[1])
    if source not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        own["PYTHONPATH"] = source
    return {**kept, **own}


def renamed(given: Mapping[str, str]) -> dict[str, str]:
    """Return the script's own variables under names that no program knows."""
    return {f"{_GIVEN}{name}": value for name, value in given.items()}


def script_environment(launched: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the script, from that of the first process in the sandbox."""
    machine = {name: value for name, value in launched.items() if not name.startswith(_GIVEN)}
    given = {name.removeprefix(_GIVEN): value for name, value in launched.items() if name.startswith(_GIVEN)}
    own = {name: machine[name] for name in _OWN_NAMES if name in machine}
    paths = [given.get("PYTHONPATH", ""), machine.get("PYTHONPATH", "")]
    if any(paths):
        own["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**machine, **given, **own}


def python_roots(python: Path) -> tuple[str, ...]:
    """Return the directories that a Python and this package need, and that the script may read."""
    roots = [*_prefixes(python), *_prefixes(Path(sys.executable))]
    roots += [Path(sys.prefix), Path(sys.base_prefix), Path(barnraise.__file__).parent]
    roots += [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    # Not the whole sys.path, which begins with the directory in which the person typed the command.
    specs = [find_spec(name) for name in _DEPENDENCIES]
    roots += [Path(spec.origin).parents[1] for spec in specs if spec is not None and spec.origin]
    return tuple(dict.fromkeys(str(root) for root in roots if root.exists()))


def _prefixes(python: Path) -> list[Path]:
    """Return the directory of a virtual environment and those of the Pythons that it is made of."""
    prefixes = [python.absolute().parent.parent, python.resolve().parent.parent]
    try:
        lines = (prefixes[0] / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return prefixes
    for line in lines:
        name, _, value = line.partition("=")
        if name.strip() == "home":
            prefixes += [Path(value.strip()).parent, Path(value.strip()).resolve().parent]
    return prefixes


def outermost(paths: Iterable[str], *, forbidden: Iterable[str]) -> tuple[str, ...]:
    """Return the paths without those inside of others, and without those that contain a forbidden one.

    A directory that contains the state directory or the home directory must not be shown as a whole.
    """
    secret = [Path(os.path.realpath(path)) for path in forbidden]
    allowed = []
    for path in dict.fromkeys(paths):
        real = Path(os.path.realpath(path))
        if real != Path(real.anchor) and not any(other.is_relative_to(real) for other in secret):
            allowed.append(Path(path))
    return tuple(
        str(path)
        for path in allowed
        if not any(path != other and path.is_relative_to(other) for other in allowed)
    )
