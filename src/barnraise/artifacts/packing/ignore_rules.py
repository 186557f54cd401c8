"""Ignore rules: all files of a folder are shipped except those in ``.gitignore`` and ``.barnraiseignore``.

A ``.barnraiseignore`` wins over every ``.gitignore``. Among files of one name the deeper one wins, and in one
file the later line, as in git. The ``.gitignore`` files above the folder count, too, up to the repository's
root, unless they ignore the folder itself.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pathspec

from barnraise.core.errors import ShippingError

RESULTS = "barnraise-runs"  # where results of runs are put, beside the script
ALWAYS_LEFT_OUT = frozenset([".git", "__pycache__", ".venv", "venv", "node_modules", RESULTS])
_OURS = ".barnraiseignore"
_GITS = ".gitignore"
_MOST_RULE_BYTES = 1 << 20
_BELOW = "ps_d"  # how pathspec calls the part of a path below what a line fits
_MOUNT_POINT = 0xA0000003  # a Windows junction: leads elsewhere as a symbolic link does

_log = logging.getLogger(__name__)


class FoundFile(NamedTuple):
    """File to ship: its path in the folder, its place on disk, and its stat result."""

    path: str
    real: str
    facts: os.stat_result


class _Rules(NamedTuple):
    base: str  # the path of the rules' folder as seen from the top, "" or with a final "/"
    spec: pathspec.GitIgnoreSpec


class _Place(NamedTuple):
    """Folder on the way down the tree."""

    path: str  # "" or with a final "/"
    real: str
    above: tuple[str, ...]  # the real folders that lead here, to notice a loop
    ours: tuple[_Rules, ...]  # the deepest first
    gits: tuple[_Rules, ...]


def walk(folder: Path, *, everything: bool = False) -> Iterator[FoundFile]:
    """Yield every file to ship, in any order. ``everything``: a data set, without ``.gitignore``."""
    top = os.path.realpath(folder)
    if not os.path.isdir(top):
        raise ShippingError(f"{folder} is not a folder", hint="Name the folder that holds the script.")
    prefix, gits = ("", ()) if everything else _rules_above(top)
    waiting = [_Place("", top, (top,), (), gits)]
    while waiting:
        place = waiting.pop()
        entries = _entries(place)
        names = {entry.name for entry in entries if entry.is_file()}
        if _OURS in names:
            place = place._replace(ours=(_read_rules(place, _OURS, prefix), *place.ours))
        if _GITS in names and not everything:
            place = place._replace(gits=(_read_rules(place, _GITS, prefix), *place.gits))
        for entry in entries:
            result = _judge(place, entry, top, prefix)
            if isinstance(result, _Place):
                waiting.append(result)
            elif result is not None:
                yield result


def _entries(place: _Place) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(place.real) as listing:
            return sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        raise _unreadable(place.path or ".", error) from error


def _judge(place: _Place, entry: os.DirEntry[str], top: str, prefix: str) -> FoundFile | _Place | None:
    if entry.name in ALWAYS_LEFT_OUT:
        return None
    path = place.path + entry.name
    real = entry.path
    try:
        own = entry.stat(follow_symlinks=False)
        is_link = entry.is_symlink() or getattr(own, "st_reparse_tag", 0) == _MOUNT_POINT
        is_folder = entry.is_dir()  # of what a link leads to
        if _is_left_out(place, prefix + path + ("/" if is_folder else "")):
            return None
        if is_link:
            real = _follow(path, real, top)
            own = os.stat(real)
    except OSError as error:
        raise _unreadable(path, error) from error
    if is_folder:
        if is_link and real in place.above:
            raise ShippingError(
                f"the symbolic link {path!r} leads back to a folder that it lies in",
                hint="Remove it, or list it in `.barnraiseignore`.",
            )
        return _Place(f"{path}/", real, (*place.above, real), place.ours, place.gits)
    if not stat.S_ISREG(own.st_mode):
        _log.info("%s is not a file and is left out", path)
        return None
    return FoundFile(path, real, own)


def _is_left_out(place: _Place, path: str) -> bool:
    for rules in (*place.ours, *place.gits):
        ignored = _said(rules.spec, path[len(rules.base) :])
        if ignored is not None:
            return ignored
    return False


def _said(spec: pathspec.GitIgnoreSpec, path: str) -> bool | None:
    """Return True if the last line that matches the path itself ignores it.

    In pathspec a line that matches a folder also matches everything below it. In git it does not: with ``q``
    and ``!/p``, ``p/q`` is ignored. The walk comes from above, so the folders were judged already.
    """
    for pattern in reversed(list(spec.patterns)):
        if pattern.regex is not None and any(map(_is_of_itself, pattern.regex.finditer(path))):
            return pattern.include
    return None


def _is_of_itself(match: re.Match[str]) -> bool:
    """Return True if a line matches the whole path, not only a folder above it."""
    below = match.start(_BELOW) if _BELOW in match.re.groupindex else -1
    return below in (-1, len(match.string) - 1)


def _follow(path: str, link: str, top: str) -> str:
    real = os.path.realpath(link)
    if not os.path.exists(real):
        raise ShippingError(
            f"the symbolic link {path!r} leads nowhere",
            hint="Remove it, or list it in `.barnraiseignore`.",
        )
    if not _is_inside(real, top):
        raise ShippingError(
            f"the symbolic link {path!r} leads out of the folder, to {real}",
            hint="Copy what it leads to into the folder, give it with `--data NAME=PATH`, or list the link "
            "in `.barnraiseignore`.",
        )
    return real


def _is_inside(path: str, top: str) -> bool:
    same_drive = os.path.splitdrive(path)[0] == os.path.splitdrive(top)[0]
    return same_drive and os.path.commonpath([path, top]) == top


def _rules_above(top: str) -> tuple[str, tuple[_Rules, ...]]:
    """Return the rules of the repository around the folder, and the folder's path in it."""
    repository = Path(top)
    while not (repository / ".git").exists():
        if repository == repository.parent:
            return "", ()
        repository = repository.parent
    if str(repository) == top:
        return "", ()
    parts = Path(top).relative_to(repository).parts
    place = _Place("", str(repository), (), (), ())
    for number in range(len(parts)):
        if (Path(place.real) / _GITS).is_file():
            place = place._replace(gits=(_read_rules(place, _GITS, ""), *place.gits))
        path = "/".join(parts[: number + 1]) + "/"
        if _is_left_out(place, path):
            return "", ()
        place = place._replace(path=path, real=str(repository.joinpath(*parts[: number + 1])))
    return place.path, place.gits


def _read_rules(place: _Place, name: str, prefix: str) -> _Rules:
    path = os.path.join(place.real, name)
    try:
        with open(path, "rb") as file:
            lines = file.read(_MOST_RULE_BYTES).decode("utf-8-sig", errors="replace").splitlines()
        # For git `p/**` is what lies in p and not p itself; pathspec takes only the longer form so.
        lines = [f"{line.rstrip()}/*" if line.rstrip().endswith("/**") else line for line in lines]
        return _Rules(prefix + place.path, pathspec.GitIgnoreSpec.from_lines(lines))
    except OSError as error:
        raise _unreadable(place.path + name, error) from error
    except ValueError as error:
        raise ShippingError(
            f"{place.path + name} cannot be understood: {error}", hint="Correct the line that it names."
        ) from error


def _unreadable(path: str, error: OSError) -> ShippingError:
    return ShippingError(
        f"{path!r} cannot be read: {error.strerror or error}",
        hint="Make it readable for you, or list it in `.barnraiseignore`.",
    )
