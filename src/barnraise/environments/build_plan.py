"""Choice of the lock or requirements file that the run's environment is built from. Pure.

The first of these at the top of the folder is used: ``uv.lock`` with its ``pyproject.toml``,
``pylock.toml``, ``requirements.lock``, ``requirements.txt``. Without any of them, the agent's own
environment is used.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import msgspec

from barnraise.core.errors import RunEnvironmentError

Mode = Literal["auto", "sync", "agent"]
Kind = Literal["agent", "uv.lock", "pylock.toml", "requirements"]

SOURCES = ("uv.lock", "pylock.toml", "requirements.lock", "requirements.txt")

_INCLUDES = re.compile(r"^(?:-r|-c|--requirement|--constraint)[ \t=]*(\S+)")
_EDITABLE = re.compile(r"^(?:-e|--editable)[ \t=]*(\S+)")
_OWN_INDEX = re.compile(r"^(?:-i|--index-url|--extra-index-url|--no-index)\b|download\.pytorch\.org")
# These packages fit each other only if they come from one index.
_TORCH = re.compile(r"^(?P<name>torch|torchvision|torchaudio)(?![\w.-])(?P<rest>.*)", re.IGNORECASE)
_OPTIONS = re.compile(r"\s--\w.*$")
_HASH = re.compile(r"\s--hash[ =]")
_OURS = re.compile(r"^barnraise(?![\w.-])(?!\s*@)", re.IGNORECASE)
_LOCAL = re.compile(r"^(?:\.|/|file:|[\w./\\-]+[/\\])|\.(?:whl|tar\.gz|zip)\b|@\s*(?:\.|/|file:)")


class EnvironmentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Source of a run's environment; the digest changes with every change of the result.

    ``torch``: requirements that are installed first and alone, from the index that fits the machine.
    ``unhashed``: requirements without a hash, which an index can replace.
    ``sources``: requirements that are built here, which runs their code.
    ``wheels_only``: nothing is built here.
    """

    kind: Kind
    source: str = ""
    digest: str = ""
    torch: tuple[str, ...] = ()
    unhashed: int = 0
    sources: tuple[str, ...] = ()
    wheels_only: bool = False


def allow_wheels_only(plan: EnvironmentPlan) -> EnvironmentPlan:
    """Return the plan for a folder of another person: no code of its packages runs while they are installed.

    Raise RunEnvironmentError if a requirement must be built.
    """
    if plan.sources:
        raise RunEnvironmentError(
            f"{plan.source} builds {plan.sources[0]}, which would run its code outside of the sandbox",
            hint=f"Name published packages in {plan.source}, or use what is installed: `--env agent`.",
        )
    return msgspec.structs.replace(plan, wheels_only=True)


def environment_source(names: Collection[str], mode: Mode) -> str:
    """Return the file that an environment is built from, by the names at the top of a folder; empty: none."""
    if mode == "agent":
        return ""
    if "uv.lock" in names and "pyproject.toml" in names:
        return "uv.lock"
    return next((name for name in SOURCES[1:] if name in names), "")


def plan_environment(files: Mapping[str, bytes], mode: Mode) -> EnvironmentPlan:
    """Return the plan for a folder, whose files are named by relative paths with ``/``."""
    source = environment_source(files, mode)
    if source == "uv.lock":
        used = ("uv.lock", "pyproject.toml")
        return EnvironmentPlan(kind="uv.lock", source="uv.lock", digest=_digest(files, used))
    if source == "pylock.toml":
        return EnvironmentPlan(
            kind="pylock.toml", source="pylock.toml", digest=_digest(files, ("pylock.toml",))
        )
    if source:
        return _from_requirements(files, source)
    if mode == "sync":
        raise RunEnvironmentError(
            "there is nothing in the folder to build an environment from",
            hint="Put a requirements.txt or a uv.lock with its pyproject.toml into it, "
            "or use what is installed: `--env agent`.",
        )
    return EnvironmentPlan(kind="agent")


def included_lines(files: Mapping[str, bytes], name: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the lines of a requirements file and of the files that it includes, and their names."""
    used: dict[str, None] = {name: None}
    lines: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        for line in requirement_lines(files[current]):
            lines.append(line)
            included = _INCLUDES.match(line)
            if included is not None:
                path = posixpath.normpath(posixpath.join(posixpath.dirname(current), included[1]))
                if path in files and path not in used:
                    used[path] = None
                    waiting.append(path)
    return lines, tuple(used)


def _from_requirements(files: Mapping[str, bytes], name: str) -> EnvironmentPlan:
    lines, used = included_lines(files, name)
    for line in lines:
        editable = _EDITABLE.match(line)
        if editable is not None:
            raise RunEnvironmentError(
                f"{name} installs {editable[1]} as editable, which ties the environment to one folder",
                hint=f"Remove the line from {name}: the code of the folder is found without it; "
                "or use what is installed: `--env agent`.",
            )
    named = [line for line in lines if not line.startswith("-")]
    if any(_OURS.match(line) for line in named):
        # The name may belong to another project on the package index.
        raise RunEnvironmentError(
            f"{name} installs barnraise, which a run does not need",
            hint=f"Remove barnraise from {name}: a run uses the agent's version.",
        )
    # What is installed from the folder itself changes with any of its files.
    local = any(_LOCAL.search(line) for line in named if "://" not in line)
    return EnvironmentPlan(
        kind="requirements",
        source=name,
        digest=_digest(files, tuple(files) if local else used),
        torch=_torch_requirements(lines),
        unhashed=sum(_HASH.search(line) is None for line in named),
        sources=tuple(line for line in named if _is_built(line)),
    )


def _is_built(line: str) -> bool:
    """Return True for a folder, an archive or a repository; False for a wheel or a name."""
    place = line.partition(";")[0].partition(" --")[0].strip()
    is_place = "://" in place or _LOCAL.search(place) is not None
    return is_place and not place.partition("#")[0].endswith(".whl")


def _torch_requirements(lines: list[str]) -> tuple[str, ...]:
    """Return the requirements of torch and of packages that must fit its build.

    Return none if torch is not named, or if the file fixes its source. An index, an address, a hash, or a
    build such as +cu126 does so.
    """
    if any(_OWN_INDEX.search(line) for line in lines):
        return ()
    named = {line: match for line in lines if (match := _TORCH.match(line))}
    fixed = any(
        "@" in match["rest"] or "+" in match["rest"].partition(";")[0] or _HASH.search(line)
        for line, match in named.items()
    )
    if fixed or not any(match["name"].lower() == "torch" for match in named.values()):
        return ()
    return tuple(_OPTIONS.sub("", line) for line in named)


def requirement_lines(text: bytes) -> Iterator[str]:
    """Yield requirements without comments and with continued lines joined; pip judges invalid bytes."""
    joined = text.decode("utf-8-sig", "replace").replace("\\\r\n", " ").replace("\\\n", " ")
    for line in joined.splitlines():
        plain = re.sub(r"(?:^|\s)#.*$", "", line).strip()
        if plain:
            yield plain


def _digest(files: Mapping[str, bytes], names: tuple[str, ...]) -> str:
    whole = hashlib.sha256()
    for name in sorted(names):
        whole.update(f"{len(name.encode())} {len(files[name])} {name}\0".encode())
        whole.update(files[name])
    return whole.hexdigest()
