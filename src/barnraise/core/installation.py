"""Install commands, the one source of every text that shows one.

There is no release yet, so every text points to a copy of the repository.
"""

from __future__ import annotations


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


def dockerfile_hint() -> str:
    """Return a sentence about how to build an image with this machine's version."""
    return (
        "Build the image again from your copy of this repository, with these lines in its Dockerfile: "
        "COPY . /barnraise and RUN pip install /barnraise"
    )
