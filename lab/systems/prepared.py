"""Base of systems that are prepared from packages: a root with another system, and wheels for it."""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from barnraise import __version__
from lab.systems import build
from lab.systems.system import REPOSITORY, Launch

_REQUIREMENTS = REPOSITORY / ".ci" / "requirements.txt"


class PreparedSystem(ABC):
    """A system in a folder of the cache. Its parts are built once, by ``python -m lab prepare NAME``."""

    name: str
    title: str  # in sentences

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = (cache or build.cache_directory()) / self.name

    @property
    def root(self) -> Path:
        """Return the root of its file system."""
        return self.cache / "root"

    @property
    def packages(self) -> Path:
        """Return the folder of its Python packages."""
        return self.cache / "packages"

    @property
    @abstractmethod
    def python(self) -> str:
        """Return the name of the Python interpreter, for the first word of a command line."""

    @abstractmethod
    def builders(self) -> dict[Path, Callable[[Path], None]]:
        """Return its parts, and what builds each, in the order to build them in."""

    @abstractmethod
    def launch(self, argv: Sequence[str], cwd: Path, room: Path) -> Launch:
        """Return what runs a command of this system. ``room``: a folder of the host alone."""

    def why_unavailable(self) -> str | None:
        """Return what is missing for a host of this system, and the command that prepares it."""
        missing = [part.name for part in self.builders() if not part.exists()]
        return f"{self.title} hosts lack {', '.join(missing)}. Run: {self.command}" if missing else None

    @property
    def command(self) -> str:
        """Return the command that prepares the system."""
        return f"python -m lab prepare {self.name}"

    def module_paths(self, room: Path) -> tuple[Path, ...]:
        """Return the folders of modules: ours, and those of the packages."""
        return REPOSITORY / "src", REPOSITORY, _installed(room / "installed"), self.packages

    def prepare(self, say: Callable[[str], None]) -> None:
        """Build all parts that are missing."""
        self.cache.mkdir(parents=True, exist_ok=True)
        for part, builder in self.builders().items():
            build.make_once(part, builder, say)


def _installed(folder: Path) -> Path:
    """Write what an installation of Barnraise tells others about it: torch finds our backend by that."""
    known = folder / f"barnraise-{__version__}.dist-info"
    if not known.exists():
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        known.mkdir(parents=True)
        (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: barnraise\nVersion: {__version__}\n")
        groups = {"console_scripts": project["scripts"], **project["entry-points"]}
        lines = (
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
            for group, entries in groups.items()
        )
        (known / "entry_points.txt").write_text("\n".join(lines))
    return folder


def requirements_with(torch: Sequence[str]) -> list[str]:
    """Return the requirements of the checks, with this torch and what it needs instead of theirs."""
    pinned = build.read_requirements(_REQUIREMENTS)
    return [*torch, *(line for line in pinned if not line.startswith("torch=="))]
