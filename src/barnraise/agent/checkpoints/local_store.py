"""The checkpoints on this machine's disk, as files: which are there, lent to others, taken from others.

Every method may take as long as the disk takes. What a state means is nothing to the agent: it hashes bytes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from barnraise.artifacts import ArtifactStore, FileEntry, PackedFolder
from barnraise.artifacts import FolderManifest as FileList
from barnraise.artifacts.packing.unpack import link_tree
from barnraise.artifacts.store.disk import discard, remove_tree
from barnraise.artifacts.store.linked_files import entry_of, lend, take_back
from barnraise.artifacts.store.manifest import make_manifest, piece_hash
from barnraise.core.errors import RunError, ShippingError
from barnraise.core.files import sync_path
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import (
    FILES,
    LARGEST,
    MANIFEST,
    SEAL,
    STATE,
    CheckpointManifest,
    HeldCheckpoint,
    encode,
    fingerprint,
    folder_name,
    held_of,
    manifest_in,
    out_of_date,
    read_manifest,
    sign,
    step_of,
    written_in,
)

_DROPPED = "dropped-"  # before the name of what does not count any more; the last such stay

_log = logging.getLogger(__name__)


class LocalCheckpoints:
    """``homes`` is where the folders of all runs are. ``signers``: whose signature counts for that run."""

    def __init__(self, homes: Path, store: ArtifactStore, key: NodeKey) -> None:
        self._homes = homes
        self._key = key
        self._store = store

    def folder(self, run: str) -> Path:
        return self._homes / run / "checkpoints"

    def latest(self, run: str) -> int:
        """The step of the folder that was written last, without looking into it; 0 if there is none."""
        try:
            written = written_in(self.folder(run))
        except OSError:
            return 0
        steps = [(at, step) for name, at in written.items() if (step := step_of(name)) is not None]
        return max(steps, default=(0.0, 0))[1]

    def manifests(self, run: str, signers: Collection[bytes]) -> list[CheckpointManifest]:
        """Of those that count by their signatures; whether the tensors are whole is not looked at."""
        try:
            names = os.listdir(self.folder(run))
        except OSError:
            return []
        found = []
        for name in names:
            step = step_of(name)
            if step is not None:
                try:
                    found.append(self._read(run, step, signers))
                except RunError as error:
                    _log.debug("%s of run %s does not count: %s", name, run, error.message)
        return found

    def sharded(self, run: str) -> int:
        """The highest step of which a sharded checkpoint, or a part of one, is here; 0: of none."""
        found = (self.folder(run) / "sharded").rglob("step-*/manifest.json")
        return max((step_of(path.parent.name) or 0 for path in found), default=0)

    def held(self, run: str, signers: Collection[bytes]) -> list[HeldCheckpoint]:
        return [held_of(one) for one in self.manifests(run, signers)]

    def is_whole(self, run: str, step: int, signers: Collection[bytes]) -> bool:
        """Reads all of it."""
        try:
            manifest = self._read(run, step, signers)
            return entry_of(self._folder_of(run, step) / STATE, STATE).object.hex() == manifest.file
        except (RunError, OSError):
            return False

    def publish(self, run: str, step: int, signers: Collection[bytes]) -> PackedFolder:
        """Let others fetch it; a BarnraiseError if it is not whole."""
        manifest = self._read(run, step, signers)
        packed = lend(self._folder_of(run, step), FILES, self._store)
        (state,) = (entry for entry in packed.manifest.files if entry.path == STATE)
        if state.object.hex() != manifest.file:
            take_back(self._store, packed.id)
            raise RunError(f"the checkpoint of step {step} is damaged", hint="Ask another machine.")
        return packed

    def withdraw(self, name: bytes) -> None:
        take_back(self._store, name)

    def keep(self, files: FileList, run: str, step: int, signers: Collection[bytes]) -> None:
        """What was fetched becomes a checkpoint; RunError if it is not the one that it should be.

        This machine has seen who signed it, and signs in turn: the one who saved may be removed later.
        """
        entries = {entry.path: entry for entry in files.files}
        if set(entries) != set(FILES):
            raise RunError("it is no checkpoint", hint="Ask another machine.")
        for name, most in LARGEST.items():
            if entries[name].size > most:
                raise RunError(f"its {name} is too large", hint="Ask another machine.")
        data, seal = (self._read_object(entries[name].object) for name in (MANIFEST, SEAL))
        manifest = read_manifest(data, seal, run, signers)
        if manifest.step != step or entries[STATE].object.hex() != manifest.file:
            raise RunError("it is another checkpoint than was asked for", hint="Ask another machine.")
        folder, target = self.folder(run), self._folder_of(run, step)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_tree(target)  # one that was not whole
        own = encode(sign(self._key, run, step, fingerprint(data)))
        entries[SEAL] = sealed = FileEntry(SEAL, len(own), False, (piece_hash(own),))
        self._store.put_object(sealed.object, own)
        link_tree(make_manifest(entries.values()), target, self._store.object_path)
        discard(self._store.object_path(sealed.object))
        for old in out_of_date(written_in(folder), keep=step):
            remove_tree(folder / old)

    def settle(self, run: str, signers: Collection[bytes], *, counts: bool) -> None:
        """What was saved without a quorum: it counts as agreed now, or not any more."""
        provisional = [one for one in self.manifests(run, signers) if one.provisional]
        if not counts:
            for stale in self.folder(run).glob(f"{_DROPPED}*"):
                remove_tree(stale)
        for one in sorted(provisional, key=lambda one: one.step):  # a crash leaves all but one as it was
            place = self._folder_of(run, one.step)
            if counts:
                self._confirm(place, replace(one, provisional=False))
            else:
                place.rename(place.with_name(_DROPPED + place.name))

    def _confirm(self, place: Path, manifest: CheckpointManifest) -> None:
        data = encode(manifest)
        seal = encode(sign(self._key, manifest.run, manifest.step, fingerprint(data)))
        for name, content in ((MANIFEST, data), (SEAL, seal)):
            (place / f"{name}.new").write_bytes(content)
            sync_path(place / f"{name}.new")
        for name in (MANIFEST, SEAL):
            (place / f"{name}.new").replace(place / name)
        sync_path(place)

    def has_files(self, manifests: Collection[bytes]) -> bool:
        """Whether all that a run was started with is in the store."""
        return all(self.has_all(name) for name in manifests)

    def has_all(self, name: bytes) -> bool:
        """Whether all of a list is in the store."""
        manifest = self._store.manifest(name)
        return manifest is not None and not self._store.missing(manifest)

    def _folder_of(self, run: str, step: int) -> Path:
        return self.folder(run) / folder_name(step)

    def _read(self, run: str, step: int, signers: Collection[bytes]) -> CheckpointManifest:
        manifest = manifest_in(self._folder_of(run, step), run, signers)
        if manifest.step != step:
            raise RunError(f"it is that of step {manifest.step}", hint="Ask another machine.")
        return manifest

    def _read_object(self, name: bytes) -> bytes:
        try:
            return self._store.object_path(name).read_bytes()
        except OSError as error:
            raise ShippingError("what was fetched is gone from the store", hint="Fetch it again.") from error
