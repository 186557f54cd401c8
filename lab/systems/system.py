"""Operating system of a host: how a command line of a test becomes one of the machine under it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

REPOSITORY = Path(__file__).resolve().parents[2]
# Bind mounts exist only for this command and its children: nothing is left behind.
_ENTER = """
root=$1 where=$2; shift 2
for path in $BINDS; do
  [ -e "$path" ] || continue
  if [ -d "$path" ]; then mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; fi
done
exec chroot "$root" /usr/bin/env -C "$where" "$@"
"""


@dataclass(frozen=True)
class Launch:
    """A command line, and the variables to add to the environment."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class System(Protocol):
    """An operating system that hosts of the lab may have."""

    name: str

    @property
    def python(self) -> str:
        """Return the name of the Python interpreter, for the first word of a command line."""

    def why_unavailable(self) -> str | None:
        """Return what is missing for a host of this system, and the command that prepares it."""

    def launch(self, argv: Sequence[str], cwd: Path, room: Path) -> Launch:
        """Return what runs a command of this system. ``room``: a folder of the host alone."""


class Linux:
    """The system of this machine."""

    name = "linux"
    python = sys.executable

    def why_unavailable(self) -> str | None:
        return None

    def launch(self, argv: Sequence[str], cwd: Path, room: Path) -> Launch:
        return Launch(argv)


LINUX = Linux()


def in_root(
    root: Path, argv: Sequence[str], cwd: Path, room: Path, kernel: Sequence[str] = ("/proc", "/dev", "/sys")
) -> list[str]:
    """Return the command that runs argv in another root, which sees our files where they are.

    ``kernel``: the folders of the kernel that it sees, too.
    """
    binds = [*kernel, "/tmp", str(REPOSITORY), str(root.parent), str(room), str(cwd)]
    enter = f"BINDS='{' '.join(dict.fromkeys(binds))}'{_ENTER}"
    return [
        "unshare",
        "--mount",
        "--propagation=private",
        "sh",
        "-ec",
        enter,
        "sh",
        str(root),
        str(cwd),
        *argv,
    ]
