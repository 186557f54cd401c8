"""Models of a run on this machine: what its own Hugging Face cache has of them, and the run's own cache."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from barnraise.agent.artifact_service import OnManifest
from barnraise.agent_client.run_options import DataSet
from barnraise.artifacts import ArtifactStore, FolderManifest
from barnraise.artifacts.models.huggingface_cache import cache_directory
from barnraise.artifacts.models.own_copies import adopt_own_copies
from barnraise.artifacts.models.run_cache import CachedModel, make_run_cache
from barnraise.artifacts.models.weights import pickled_weights
from barnraise.core.config import Settings
from barnraise.core.errors import RunError
from barnraise.core.files import remove_tree
from barnraise.core.units import format_size

_CACHE = "huggingface"
_MOST_LISTED = 4


class RunModels:
    """Models of one run. ``report`` is called on the loop with what this machine does."""

    def __init__(
        self, settings: Settings, store: ArtifactStore, home: Path, report: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._store = store
        self._directory = home / _CACHE
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._models: list[CachedModel] = []
        self._is_closed = False

    def on_manifest(self, data: DataSet, *, asks: bool) -> OnManifest:
        """Return what is done with the list of a model's files before any of them is fetched.

        ``asks``: the run is one of others, on a guest's machine.
        """

        def look(manifest: FolderManifest, adopted: Callable[[], None]) -> None:
            if asks:
                refuse_pickles(data.name, manifest)
            adopt_own_copies(
                manifest,
                self._store,
                cache_directory(os.environ, self._settings.runs.huggingface_cache),
                data.version.repository if data.version is not None else "",
                on_compared=lambda done, size: self._compared(data.name, done, size),
                on_adopted=adopted,
            )

        return look

    def _compared(self, name: str, done: int, size: int) -> None:
        """Report how much of the cache was compared, in the thread of the comparison."""
        if self._is_closed:
            raise RunError("the run has ended")
        words = f"comparing model {name} with its Hugging Face cache: {format_size(done)}"
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._report, f"{words} of {format_size(size)}")

    def add(self, data: DataSet, manifest: FolderManifest, tree: Path) -> None:
        """Note a model that is in the store; libraries will find it by its id, if it has one."""
        if data.version is not None:
            self._models.append(CachedModel(data.version, manifest, tree))

    async def make_cache(self) -> str:
        """Create the run's own Hugging Face cache and return its path; an empty text if it needs none."""
        if not self._models:
            return ""
        await asyncio.to_thread(make_run_cache, self._directory, self._models)
        return str(self._directory)

    def close(self) -> None:
        """Remove the run's own cache, and stop a comparison that goes on."""
        self._is_closed = True
        if self._models:
            remove_tree(self._directory)


def refuse_pickles(name: str, manifest: FolderManifest) -> None:
    """Raise RunError if the names of a model's files are those of pickles: loading one may run code."""
    pickled = pickled_weights(entry.path for entry in manifest.files)
    if pickled:
        more = f" and {len(pickled) - _MOST_LISTED} more" if len(pickled) > _MOST_LISTED else ""
        raise RunError(
            f"model {name} has weights that are pickles, which a guest's machine does not take: "
            f"{', '.join(pickled[:_MOST_LISTED])}{more}",
            hint="Save the model as safetensors: save_pretrained(FOLDER, safe_serialization=True)",
        )
