"""Number of packages that a run would install, from the files that are sent with it."""

from __future__ import annotations

from barnraise.artifacts import ArtifactStore, FolderManifest, read_files
from barnraise.environments.build_plan import Mode, environment_source, plan_environment
from barnraise.environments.build_size import build_size


def listed_packages(store: ArtifactStore, folder: FolderManifest, mode: Mode) -> int:
    """Return how many packages each machine would install, as a guest's user is told."""
    tops = [entry.path for entry in folder.files if "/" not in entry.path]
    if not environment_source(tops, mode):
        return 0
    files = read_files(store, folder, lambda path: "/" not in path)
    return build_size(plan_environment(files, mode), files).packages
