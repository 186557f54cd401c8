"""Building blocks of foreign systems: a cache with finished parts, packages of Debian, and wheels."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.namespaces import LabError

_MIRROR = "http://deb.debian.org/debian"


def cache_directory() -> Path:
    """Return where prepared systems are kept: LAB_CACHE, or below the user's cache directory."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "barnraise-lab"
    return Path(os.environ.get("LAB_CACHE") or default)


def make_once(part: Path, build: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """Build a part of a system unless it exists. A part that was not finished is built again."""
    if part.exists():
        return part
    say(f"preparing {part.name}")
    draft = part.with_name(f"{part.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    build(draft)
    draft.rename(part)
    return part


def execute(argv: Sequence[str | Path], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command of the preparation; raise LabError with the end of its output if it fails."""
    words = [str(word) for word in argv]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise LabError(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def need_tools(*tools: str) -> None:
    """Raise LabError unless these programs are installed."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise LabError(f"{', '.join(missing)} is missing. Run: apt-get install {' '.join(missing)}")


def debootstrap(target: Path, suite: str, *options: str) -> None:
    """Create a small Debian system."""
    need_tools("debootstrap")
    execute(["debootstrap", "--variant=minbase", *options, suite, target, _MIRROR])


def install_wheels(
    target: Path,
    requirements: Sequence[str],
    platforms: Sequence[str],
    python: str,
    *,
    dependencies: bool = False,
) -> None:
    """Unpack wheels of another system into a folder, exactly the requirements that are given.

    A package without wheels is installed as it is here. That works for packages of plain Python.
    ``dependencies``: also what they need; all of that must have wheels.
    """
    tags = [option for platform in platforms for option in ("--platform", platform)]
    common: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--target",
        target,
    ]
    foreign = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *tags]
    if dependencies:
        execute([*common, *foreign, *requirements])
        return
    for requirement in requirements:
        try:
            execute([*common, "--no-deps", *foreign, requirement])
        except LabError:
            execute([*common, "--no-deps", requirement])


def compile_modules(folder: Path) -> None:
    """Compile Python modules here, once: byte code is the same on all systems. Some files are templates."""
    words = [sys.executable, "-m", "compileall", "-qq", "-j", "0", str(folder)]
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def download_wheel(folder: Path, requirement: str, platform: str, python: str) -> Path:
    """Download one wheel of another system and return its path."""
    execute(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--platform", platform, "--python-version", python, "--dest", folder, requirement),
        ]
    )
    name = requirement.partition("==")[0].replace("-", "_").lower()
    return next(path for path in folder.glob("*.whl") if path.name.lower().startswith(name))


def read_requirements(path: Path, names: Sequence[str] | None = None) -> list[str]:
    """Return the pinned requirements of a file; ``names``: only these."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    pinned = [line for line in lines if "==" in line]
    return pinned if names is None else [line for line in pinned if line.partition("==")[0] in names]
