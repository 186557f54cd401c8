"""Probe of one Python's packages: uses the standard library only, because other Pythons run this file.

Reads a JSON list of import names and prints one JSON line. It imports no package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_WORD = 128


def probe(names: Iterable[str], distributions: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the facts about this interpreter; ``distributions`` maps import names to distributions."""
    importlib.invalidate_caches()
    packages = []
    missing = []
    for name in dict.fromkeys(names):
        distribution = _distribution(name, distributions.get(name, ()))
        if not _is_there(name, distribution is not None):
            missing.append(name)
            continue
        version = None if distribution is None else _version(distribution)
        packages.append({"name": name, "distribution": distribution, "version": version})
    return {
        "python": platform.python_version()[:_WORD],
        "implementation": platform.python_implementation()[:_WORD],
        "os": platform.system()[:_WORD],
        "arch": platform.machine()[:_WORD],
        "executable": sys.executable[:1024],
        "torch": _version("torch"),
        "packages": packages,
        "missing": missing,
    }


def _is_there(name: str, has_distribution: bool) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001 - finders of other packages are asked too, and fail in their own ways
        return False
    if spec is None:
        return False
    # Any folder of that name looks like a package without a file of its own.
    return spec.has_location or spec.origin in {"built-in", "frozen"} or has_distribution


def _distribution(name: str, candidates: Sequence[str]) -> str | None:
    """Return the distribution of the same name if any; several may share a namespace, such as ``google``."""
    same = [each for each in candidates if _plain(each) == _plain(name)]
    return min(same or candidates, default="")[:_WORD] or None


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(distribution: str) -> str | None:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    # Metadata without a version gives None, although its type excludes that.
    return str(version)[:_WORD] if version else None


def search_places() -> tuple[tuple[str, int], ...]:
    """Return the folders of the search path with their times; an install or removal changes one of them."""
    places = []
    for path in sys.path:
        try:
            places.append((path, os.stat(path or ".").st_mtime_ns))
        except OSError:
            continue
    return tuple(places)


def main() -> None:
    names = json.loads(sys.stdin.buffer.read(1 << 20))
    packages = probe(map(str, names), importlib.metadata.packages_distributions())
    sys.stdout.write(json.dumps(packages) + "\n")


if __name__ == "__main__":
    main()
