"""The checkpoints on this machine's disk: list, verify, publish to others, keep fetched ones.

Every method may block on the disk. The agent hashes bytes and never decodes a state.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from barnraise.artifacts import ArtifactStore, FileEntry, PackedFolder
from barnraise.artifacts import FolderManifest as FileList
from barnraise.artifacts.packing.unpack import link_tree
from barnraise.artifacts.store.linked_files import entry_of, link_files, unlink_files
from barnraise.artifacts.store.manifest import make_manifest, piece_hash
from barnraise.core.errors import CheckpointError, RunError, ShippingError
from barnraise.core.files import discard, remove_tree, sync_path
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
    folder_step,
    load_manifest,
    modification_times,
    outdated_folders,
    read_manifest,
    sign,
    to_held_checkpoint,
)

_DROPPED = "dropped-"  # prefix of discarded checkpoints; only the latest are kept

_log = logging.getLogger(__name__)


class LocalCheckpoints:
    """Checkpoint folders of all runs, below ``homes``.

    ``signers`` in the methods: the nodes whose signature is accepted for that run.
    """

    def __init__(self, homes: Path, store: ArtifactStore, key: NodeKey) -> None:
        self._homes = homes
        self._key = key
        self._store = store

    def folder(self, run: str) -> Path:
        """Return the folder of a run's checkpoints."""
        return self._homes / run / "checkpoints"

    def latest(self, run: str) -> int:
        """Return the step of the folder that was written last, or 0; its files are not read."""
        try:
            written = modification_times(self.folder(run))
        except OSError:
            return 0
        steps = [(at, step) for name, at in written.items() if (step := folder_step(name)) is not None]
        return max(steps, default=(0.0, 0))[1]

    def size(self, run: str, step: int) -> int:
        """Return the bytes of a checkpoint, also of one that waits for its signature; 0 if it is not here."""
        sizes: Counter[str] = Counter()
        for file in self.folder(run).glob(f"*{step:08}/*"):
            with contextlib.suppress(OSError):  # a draft becomes a checkpoint
                sizes[file.parent.name] += file.stat().st_size
        return max(sizes.values(), default=0)

    def manifests(self, run: str, signers: Collection[bytes]) -> list[CheckpointManifest]:
        """Return the manifests with an accepted signature; tensors are not verified."""
        try:
            names = os.listdir(self.folder(run))
        except OSError:
            return []
        manifests = []
        for name in names:
            step = folder_step(name)
            if step is not None:
                try:
                    manifests.append(self._read(run, step, signers))
                except RunError as error:
                    _log.debug("%s of run %s is ignored: %s", name, run, error.message)
        return manifests

    def sharded(self, run: str) -> int:
        """Return the highest step of which a shard is here, or 0."""
        paths = (self.folder(run) / "sharded").rglob("step-*/manifest.json")
        return max((folder_step(path.parent.name) or 0 for path in paths), default=0)

    def held(self, run: str, signers: Collection[bytes]) -> list[HeldCheckpoint]:
        """Return the checkpoints with an accepted signature."""
        return [to_held_checkpoint(manifest) for manifest in self.manifests(run, signers)]

    def is_whole(self, run: str, step: int, signers: Collection[bytes]) -> bool:
        """Tell whether a checkpoint is complete and undamaged; reads all of its bytes."""
        try:
            manifest = self._read(run, step, signers)
            return entry_of(self._folder_of(run, step) / STATE, STATE).object.hex() == manifest.file
        except (RunError, OSError):
            return False

    def publish(self, run: str, step: int, signers: Collection[bytes]) -> PackedFolder:
        """Link a checkpoint into the store so that others can fetch it; raise BarnraiseError if it is
        damaged."""
        manifest = self._read(run, step, signers)
        packed = link_files(self._folder_of(run, step), FILES, self._store)
        (state,) = (entry for entry in packed.manifest.files if entry.path == STATE)
        if state.object.hex() != manifest.file:
            unlink_files(self._store, packed.id)
            raise CheckpointError(f"the checkpoint of step {step} is damaged", hint="Ask another machine.")
        return packed

    def withdraw(self, name: bytes) -> None:
        """Remove a published checkpoint from the store."""
        unlink_files(self._store, name)

    def keep(self, files: FileList, run: str, step: int, signers: Collection[bytes]) -> None:
        """Turn fetched files into a checkpoint; raise CheckpointError if they are not the expected one.

        This machine signs the checkpoint again, because the original signer may be removed from the cluster
        later.
        """
        entries = {entry.path: entry for entry in files.files}
        if set(entries) != set(FILES):
            raise CheckpointError("the fetched files are not a checkpoint", hint="Ask another machine.")
        for name, limit in LARGEST.items():
            if entries[name].size > limit:
                raise CheckpointError(
                    f"the {name} of the checkpoint is too large", hint="Ask another machine."
                )
        data, seal = (self._read_object(entries[name].object) for name in (MANIFEST, SEAL))
        manifest = read_manifest(data, seal, run, signers)
        if manifest.step != step or entries[STATE].object.hex() != manifest.file:
            raise CheckpointError(
                "the fetched files are another checkpoint than the requested one", hint="Ask another machine."
            )
        folder, target = self.folder(run), self._folder_of(run, step)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_tree(target)  # an incomplete one
        own_seal = encode(sign(self._key, run, step, fingerprint(data)))
        entries[SEAL] = own_entry = FileEntry(SEAL, len(own_seal), False, (piece_hash(own_seal),))
        self._store.put_object(own_entry.object, own_seal)
        link_tree(make_manifest(entries.values()), target, self._store.object_path)
        discard(self._store.object_path(own_entry.object))
        for old in outdated_folders(modification_times(folder), keep=step):
            remove_tree(folder / old)

    def settle(self, run: str, signers: Collection[bytes], *, counts: bool) -> None:
        """Confirm checkpoints that were saved without a quorum, or rename them away."""
        provisional = [manifest for manifest in self.manifests(run, signers) if manifest.provisional]
        if not counts:
            for stale in self.folder(run).glob(f"{_DROPPED}*"):
                remove_tree(stale)
        # In order: a crash leaves at most one half-changed.
        for manifest in sorted(provisional, key=lambda manifest: manifest.step):
            folder = self._folder_of(run, manifest.step)
            if counts:
                self._confirm(folder, replace(manifest, provisional=False))
            else:
                folder.rename(folder.with_name(_DROPPED + folder.name))

    def sign_again(self, former: bytes) -> None:
        """Sign the checkpoints again that this machine signed with its former key."""
        for home in self._homes.glob("*"):
            for manifest in self.manifests(home.name, {former}):
                self._confirm(self._folder_of(home.name, manifest.step), manifest)

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
        """Tell whether the store has all files of these manifests."""
        return all(self.has_all(name) for name in manifests)

    def has_all(self, name: bytes) -> bool:
        """Tell whether the store has a manifest and all of its files."""
        manifest = self._store.manifest(name)
        return manifest is not None and not self._store.missing(manifest)

    def _folder_of(self, run: str, step: int) -> Path:
        return self.folder(run) / folder_name(step)

    def _read(self, run: str, step: int, signers: Collection[bytes]) -> CheckpointManifest:
        manifest = load_manifest(self._folder_of(run, step), run, signers)
        if manifest.step != step:
            raise CheckpointError(
                f"the checkpoint is of step {manifest.step}, not {step}", hint="Ask another machine."
            )
        return manifest

    def _read_object(self, name: bytes) -> bytes:
        try:
            return self._store.object_path(name).read_bytes()
        except OSError as error:
            raise ShippingError(
                "the fetched files are gone from the store", hint="Fetch it again."
            ) from error
