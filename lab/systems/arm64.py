"""arm64 hosts: a small Debian for arm64, whose programs run under qemu's user emulation."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.systems import build
from lab.systems.system import REPOSITORY, Launch, in_root

_SUITE = "bookworm"  # its Python is 3.11
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
_PYTHON = "3.11"
# The last torch for arm64 without CUDA libraries on the index.
_TORCH = "torch==2.10.0"
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_PREPARE = "python -m lab prepare arm64"


class Arm64:
    """Linux on arm64, emulated."""

    name = "arm64"
    python = "/usr/bin/python3.11"

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = (cache or build.cache_directory()) / "arm64"

    @property
    def _root(self) -> Path:
        return self._cache / "root"

    @property
    def _packages(self) -> Path:
        return self._cache / "packages"

    def why_unavailable(self) -> str | None:
        missing = [part.name for part in (self._root, self._packages) if not part.exists()]
        if missing:
            return f"arm64 hosts lack {', '.join(missing)}. Run: {_PREPARE}"
        if not (_BINFMT / "qemu-aarch64").exists():
            return f"the kernel does not start arm64 programs. Run: {_PREPARE}"
        return None

    def launch(self, argv: Sequence[str], cwd: Path, room: Path) -> Launch:
        paths = (REPOSITORY / "src", REPOSITORY, self._packages)
        environment = {
            "PYTHONPATH": ":".join(str(path) for path in paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return Launch(in_root(self._root, argv, cwd, room), environment)

    def prepare(self, say: Callable[[str], None]) -> None:
        """Build all parts that are missing, and let the kernel start arm64 programs."""
        build.need_tools("debootstrap", "update-binfmts", "qemu-aarch64-static")
        self._cache.mkdir(parents=True, exist_ok=True)
        build.make_once(self._root, _make_root, say)
        build.make_once(self._packages, _make_packages, say)
        if not (_BINFMT / "register").exists():
            build.execute(["mount", "-t", "binfmt_misc", "none", _BINFMT])
        if not (_BINFMT / "qemu-aarch64").exists():
            build.execute(["update-binfmts", "--enable", "qemu-aarch64"])


def _make_root(folder: Path) -> None:
    """Unpack the packages of a small system. Their scripts are not needed, and would be slow here."""
    build.debootstrap(folder, _SUITE, "--foreign", "--arch=arm64", "--include=python3,ca-certificates")
    for package in sorted((folder / "var" / "cache" / "apt" / "archives").glob("*.deb")):
        build.execute(["dpkg-deb", "--extract", package, folder])
    shutil.rmtree(folder / "var" / "cache" / "apt")
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc" / "group").write_text("root:x:0:\n")


def _make_packages(folder: Path) -> None:
    requirements = build.read_requirements(REPOSITORY / ".ci" / "requirements.txt")
    chosen = [_TORCH if line.startswith("torch==") else line for line in requirements]
    build.install_wheels(folder, chosen, _PLATFORMS, _PYTHON)
