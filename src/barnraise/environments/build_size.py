"""Size of an environment, as far as it is known before the build."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from barnraise.artifacts import ArtifactStore, FolderManifest, read_files
from barnraise.core.units import counted, format_size
from barnraise.environments.build_plan import (
    EnvironmentPlan,
    Mode,
    environment_source,
    included_lines,
    plan_environment,
)

_NAMED = re.compile(r"^[A-Za-z0-9][\w.-]*(?![\w.+/:-])")  # not an address or a path


class BuildSize(msgspec.Struct, frozen=True):
    """Packages of an environment. ``max_bytes``: size of the largest file of each; 0 if unknown."""

    packages: int
    has_torch: bool = False
    max_bytes: int = 0

    @property
    def text(self) -> str:
        """Return the size for a person: ``7 packages, at most 2 GiB``."""
        packages = counted(self.packages, "package")
        if self.max_bytes:
            return f"{packages}, at most {format_size(self.max_bytes)}"
        return f"{packages}, with torch: 0.2 to 3 GB" if self.has_torch else packages


def build_size(plan: EnvironmentPlan, files: Mapping[str, bytes]) -> BuildSize:
    """Return what the source of an environment says about its size. Files that cannot be read say nothing."""
    source = files[plan.source]
    if plan.kind == "requirements":
        lines = [line for line in included_lines(files, plan.source)[0] if not line.startswith("-")]
        names = {match[0].lower() if (match := _NAMED.match(line)) else line for line in lines}
        return BuildSize(len(names), "torch" in names)
    try:
        lock = tomllib.loads(source.decode("utf-8", "replace"))
    except tomllib.TOMLDecodeError:
        return BuildSize(0)
    listed = lock.get("package", lock.get("packages"))
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    packages = [entry for entry in entries if not _is_folder(entry)]
    sizes = [_max_size(package) for package in packages]
    # One unknown size makes the sum worthless.
    known = 0 if 0 in sizes else sum(sizes)
    return BuildSize(len(packages), any(package.get("name") == "torch" for package in packages), known)


def listed_packages(store: ArtifactStore, folder: FolderManifest, mode: Mode) -> int:
    """Return how many packages each machine would install, as a guest's user is told."""
    tops = [entry.path for entry in folder.files if "/" not in entry.path]
    if not environment_source(tops, mode):
        return 0
    files = read_files(store, folder, lambda path: "/" not in path)
    return build_size(plan_environment(files, mode), files).packages


def _is_folder(package: Mapping[str, Any]) -> bool:
    """Tell whether an entry of a lock is code of the folder itself, which is not installed."""
    source = package.get("source", package)
    return isinstance(source, dict) and not source.keys().isdisjoint(("virtual", "editable", "directory"))


def _max_size(package: Mapping[str, Any]) -> int:
    wheels = package.get("wheels")
    files = [*(wheels if isinstance(wheels, list) else ()), package.get("sdist")]
    sizes = [file.get("size") for file in files if isinstance(file, dict)]
    return max((size for size in sizes if isinstance(size, int) and size > 0), default=0)
