"""Portable names: names that every machine of a mixed cluster can hold without collisions."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from barnraise.core.errors import ShippingError
from barnraise.core.sanitize import forges_names

MOST_NAME_BYTES = 255
MOST_PATH_BYTES = 1024
MOST_DEPTH = 64
_MOST_LISTED = 20
_SIGNS = frozenset('<>:"|?*\\')
_DIGITS = "0123456789¹²³"
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [f"{device}{digit}" for device in ("com", "lpt") for digit in _DIGITS]
)


def why_unusable(path: str) -> str | None:
    """Return why a relative path with ``/`` cannot exist on every machine, or None."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if len(encoded) > MOST_PATH_BYTES:
        return f"has more than {MOST_PATH_BYTES} bytes"
    parts = path.split("/")
    if len(parts) > MOST_DEPTH:
        return f"is more than {MOST_DEPTH} folders deep"
    return next((why for part in parts if (why := _why_part_unusable(part)) is not None), None)


def _why_part_unusable(part: str) -> str | None:
    if part in ("", ".", ".."):
        return "does not stay below the folder"
    if part.isascii() and part.isalnum() and len(part) > 6:  # by far the most names: nothing below fits them
        return f"has a name of more than {MOST_NAME_BYTES} bytes" if len(part) > MOST_NAME_BYTES else None
    if len(part.encode()) > MOST_NAME_BYTES:
        return f"has a name of more than {MOST_NAME_BYTES} bytes"
    if any(sign in _SIGNS or ord(sign) < 32 for sign in part):
        return 'has a control character or one of < > : " | ? * \\, which Windows does not allow'
    if (not part.isascii() or "\x7f" in part) and any(map(forges_names, part)):
        return "has a control character or a mark of direction, so that it would look like another name"
    if part[-1] in ". ":
        return "has a name that ends with a dot or a space, which Windows does not allow"
    if part.split(".", 1)[0].rstrip(" ").casefold() in _DEVICES:
        return "has the name of a device on Windows"
    return None


def folded(path: str) -> str:
    """Return a form that is equal for names that a case-insensitive or normalizing disk takes for one."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def name_problems(paths: Iterable[str]) -> list[str]:
    """Return a sentence for each unusable path and for each pair that collides on some machine."""
    problems = []
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    usable = []
    for path in paths:
        why = why_unusable(path)
        if why is not None:
            problems.append(f"{path!r} {why}")
            continue
        other = files.setdefault(folded(path), path)
        if other != path:
            problems.append(f"{path!r} and {other!r} differ only in case or in the form of a letter")
        usable.append(path)
    for parent in sorted({path.rpartition("/")[0] for path in usable}):
        while parent:
            key = folded(parent)
            known = folders.setdefault(key, parent)
            if known != parent:
                problems.append(
                    f"the folders {parent!r} and {known!r} differ only in case or in a letter's form"
                )
            if key in files:
                problems.append(f"{files[key]!r} is a file and {parent!r} a folder")
            parent = parent.rpartition("/")[0]
    return list(dict.fromkeys(problems))


def check_names(paths: Iterable[str]) -> None:
    """Raise ShippingError with the list of problems, if there are any."""
    problems = name_problems(paths)
    if problems:
        shown = problems[:_MOST_LISTED]
        rest = f"\n  and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
        raise ShippingError(
            "some machines cannot hold these names:\n  " + "\n  ".join(shown) + rest,
            hint="Rename them, or list them in `.barnraiseignore`.",
        )
