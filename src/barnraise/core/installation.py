"""Install commands, the one source of every text that shows one, and the tested versions of torch. Pure.

There is no release yet, so every text points to a copy of the repository. torch itself is not imported.
"""

from __future__ import annotations

from pathlib import PurePath

# pyproject.toml's extra says the same (a test compares them).
TESTED_RANGE = ">=2.13,<2.16"
TESTED_FIRST = (2, 13)
TESTED_BELOW = (2, 16)


def install_command(*extras: str, python: str = "", options: str = "") -> str:
    """Return the command that installs a copy of the repository, with these extras."""
    pip = f"{python} -m pip" if python else "pip"
    target = f'".[{",".join(extras)}]"' if extras else "."
    return " ".join(part for part in (pip, "install", options, target) if part)


def install_hint(*extras: str, python: str = "", options: str = "") -> str:
    """Return a sentence with the install command and the folder to run it in."""
    return f"Run in your copy of this repository: {install_command(*extras, python=python, options=options)}"


def upgrade_hint() -> str:
    """Return a sentence about how to update this machine."""
    return f"Update your copy of this repository, then run in it: {install_command()}"


def uninstall_command(python: str, prefix: PurePath, *, has_pip: bool) -> str:
    """Return the command that removes this installation, which has its packages under ``prefix``."""
    parents = prefix.parts
    if "pipx" in parents:
        return "pipx uninstall barnraise"
    if parents[-3:-1] == ("uv", "tools"):
        return "uv tool uninstall barnraise"
    quoted = f'"{python}"' if " " in python else python
    if not has_pip:
        return f"uv pip uninstall --python {quoted} barnraise"
    return f"{quoted} -m pip uninstall barnraise"


def dockerfile_hint() -> str:
    """Return a sentence about how to build an image with this machine's version."""
    return (
        "Build the image again from your copy of this repository, with these lines in its Dockerfile: "
        "COPY . /barnraise and RUN pip install /barnraise"
    )


def is_tested(version: str) -> bool:
    """Return True if a version such as ``2.13.0+cpu`` is in the tested range."""
    return TESTED_FIRST <= release_of(version) < TESTED_BELOW


def release_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, or zeros if it has none."""
    numbers = version.split("+")[0].split(".")
    try:
        return int(numbers[0]), int(numbers[1])
    except (IndexError, ValueError):
        return 0, 0
