"""arm64 hosts: a small Debian for arm64, whose programs run under qemu's user emulation."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.systems import build
from lab.systems.prepared import PreparedSystem, requirements_with
from lab.systems.system import Launch, in_root

_SUITE = "bookworm"  # its Python is 3.11
_PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{glibc}_aarch64" for glibc in range(17, 37)))
_PYTHON = "3.11"
_TORCH = "torch==2.13.0"
_PROCESSOR = "0x00000000414fd0c1\n"  # Arm Neoverse N1
_BINFMT = Path("/proc/sys/fs/binfmt_misc")


class Arm64(PreparedSystem):
    """Linux on arm64, emulated."""

    name = "arm64"
    title = "arm64"

    @property
    def python(self) -> str:
        return "/usr/bin/python3.11"

    def builders(self) -> dict[Path, Callable[[Path], None]]:
        return {self.root: _make_root, self.packages: _make_packages}

    def why_unavailable(self) -> str | None:
        if (missing := super().why_unavailable()) is not None:
            return missing
        if not (_BINFMT / "qemu-aarch64").exists():
            return f"the kernel does not start arm64 programs. Run: {self.command}"
        return None

    def launch(self, argv: Sequence[str], cwd: Path, room: Path) -> Launch:
        environment = {
            "PYTHONPATH": ":".join(map(str, self.module_paths(room))),
            "PYTHONDONTWRITEBYTECODE": "1",
            # The processor that qemu takes by default has SVE, and torch's matrix products are wrong with it.
            "QEMU_CPU": "cortex-a72",
        }
        return Launch(in_root(self.root, argv, cwd, room, kernel=("/proc", "/dev")), environment)

    def prepare(self, say: Callable[[str], None]) -> None:
        """Build all parts that are missing, and let the kernel start arm64 programs."""
        build.need_tools("debootstrap", "update-binfmts", "qemu-aarch64-static")
        super().prepare(say)
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
    _describe_processors(folder / "sys" / "devices" / "system" / "cpu", os.cpu_count() or 1)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc" / "group").write_text("root:x:0:\n")


def _describe_processors(folder: Path, count: int) -> None:
    """Write what torch reads of the kernel about its processors. Without it, its import crashes."""
    for number in range(count):
        registers = folder / f"cpu{number}" / "regs" / "identification"
        registers.mkdir(parents=True)
        (registers / "midr_el1").write_text(_PROCESSOR)
    for name in ("possible", "present"):
        (folder / name).write_text(f"0-{count - 1}\n")


def _make_packages(folder: Path) -> None:
    # From 2.11 on, torch for arm64 needs CUDA libraries at its import, also without a GPU.
    build.install_wheels(folder, [_TORCH], _PLATFORMS, _PYTHON, dependencies=True)
    build.install_wheels(folder, requirements_with([]), _PLATFORMS, _PYTHON)
    build.compile_modules(folder)
