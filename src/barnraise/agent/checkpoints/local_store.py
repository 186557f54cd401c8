"""The checkpoints on this machine's disk: list, verify, publish to others, keep fetched ones.

Every method may block on the disk. The agent hashes bytes and never decodes a state.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from msgspec.structs import replace

from barnraise.artifacts import ArtifactStore, FileEntry, PackedFolder
from barnraise.artifacts import FolderManifest as FileList
from barnraise.artifacts.packing.unpack import link_tree
from barnraise.artifacts.store.linked_files import entry_of, link_files, unlink_files
from barnraise.artifacts.store.manifest import make_manifest, piece_hash
from barnraise.core.errors import CheckpointError, RunError, ShippingError
from barnraise.core.files import discard, remove_tree, sync_path
from barnraise.core.files import replace as replace_file
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import (
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
_FETCHED = ".fetched-"  # prefix of parts that are about to join a checkpoint

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
        """Return the checkpoints with an accepted signature. Parts count by their size."""
        manifests = self.manifests(run, signers)
        return [to_held_checkpoint(manifest, self._parts_of(manifest)) for manifest in manifests]

    def is_whole(self, run: str, step: int, signers: Collection[bytes]) -> bool:
        """Tell whether a checkpoint is complete and undamaged; reads all of its bytes."""
        try:
            manifest = self._read(run, step, signers)
            if manifest.parts:
                every = {part.number for part in manifest.parts}
                return self._whole_parts(manifest, every) == every
            return entry_of(self._folder_of(run, step) / STATE, STATE).object.hex() == manifest.file
        except (RunError, OSError):
            return False

    def missing_parts(
        self, held: HeldCheckpoint, wanted: Collection[int], signers: Collection[bytes]
    ) -> frozenset[int]:
        """Return which of these parts of a checkpoint are not here and whole; reads those that are here."""
        try:
            manifest = self._read(held.run, held.step, signers)
        except RunError:
            return frozenset(wanted)
        if (manifest.generation, len(manifest.parts)) != (held.generation, held.count):
            return frozenset(wanted)
        return frozenset(wanted) - self._whole_parts(manifest, wanted)

    def version(self, run: str, step: int) -> bytes:
        """Return a hash that changes if a step is saved again; empty if it is not here."""
        try:
            return fingerprint((self._folder_of(run, step) / MANIFEST).read_bytes())
        except OSError:
            return b""

    def publish(
        self, run: str, step: int, signers: Collection[bytes], parts: Collection[int] = ()
    ) -> PackedFolder:
        """Link a checkpoint, or some of its parts, into the store so that others can fetch it.

        Damaged parts are left out. Raise BarnraiseError if nothing is left.
        """
        manifest = self._read(run, step, signers)
        expected = _state_files(manifest, parts)
        packed = link_files(self._folder_of(run, step), (MANIFEST, SEAL, *expected), self._store)
        if _matches(packed.manifest, expected):
            return packed
        unlink_files(self._store, packed.id)
        here = {entry.path: entry.object.hex() for entry in packed.manifest.files}
        whole = [name for name, file in expected.items() if here[name] == file]
        if not whole:
            raise CheckpointError(f"the checkpoint of step {step} is damaged", hint="Ask another machine.")
        return link_files(self._folder_of(run, step), (MANIFEST, SEAL, *whole), self._store)

    def withdraw(self, name: bytes) -> None:
        """Remove a published checkpoint from the store."""
        unlink_files(self._store, name)

    def keep(
        self,
        files: FileList,
        run: str,
        step: int,
        signers: Collection[bytes],
        generation: int | None = None,
    ) -> None:
        """Turn fetched files into a checkpoint; raise CheckpointError if they are not the expected one.

        This machine signs the checkpoint again, because the original signer may be removed from the cluster
        later. Parts join those that are here already. ``generation``: the one that was asked for, if it is
        known.
        """
        entries = {entry.path: entry for entry in files.files}
        if not entries.keys() > LARGEST.keys():
            raise CheckpointError("the fetched files are not a checkpoint", hint="Ask another machine.")
        for name, limit in LARGEST.items():
            if entries[name].size > limit:
                raise CheckpointError(
                    f"the {name} of the checkpoint is too large", hint="Ask another machine."
                )
        data, seal = (self._read_object(entries[name].object) for name in (MANIFEST, SEAL))
        manifest = read_manifest(data, seal, run, signers)
        named = {part.name: part.number for part in manifest.parts}
        received = [named[name] for name in entries if name in named]
        expected = _state_files(manifest, received)
        is_other = manifest.step != step or generation not in (None, manifest.generation)
        if is_other or not _matches(files, expected):
            raise CheckpointError(
                "the fetched files are another checkpoint than the requested one", hint="Ask another machine."
            )
        folder, target = self.folder(run), self._folder_of(run, step)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = self._parts_of_group(manifest, signers) if received else None
        if own is not None and own.parts == manifest.parts:
            self._add(target, [entries[name] for name in expected])
            return
        if own is not None and (manifest.provisional or not own.provisional):
            raise CheckpointError(
                "this machine has another checkpoint of the same step and group", hint="Ask another machine."
            )
        remove_tree(target)  # an incomplete one
        own_seal = encode(sign(self._key, run, step, fingerprint(data)))
        entries[SEAL] = own_entry = FileEntry(SEAL, len(own_seal), False, (piece_hash(own_seal),))
        self._store.put_object(own_entry.object, own_seal)
        link_tree(make_manifest(entries.values()), target, self._store.object_path)
        discard(self._store.object_path(own_entry.object))
        # Also of parts: whether all of a checkpoint are in reach is not known here.
        for old in outdated_folders(modification_times(folder), step):
            remove_tree(folder / old)

    def _parts_of_group(
        self, manifest: CheckpointManifest, signers: Collection[bytes]
    ) -> CheckpointManifest | None:
        """Return the manifest of the parts of this step that are here; None if another group saved them.

        They may still differ: without a quorum, two groups can have the same number.
        """
        try:
            own = self._read(manifest.run, manifest.step, signers)
        except RunError:
            return None
        return own if own.parts and own.generation == manifest.generation else None

    def _add(self, target: Path, entries: Collection[FileEntry]) -> None:
        """Add fetched parts to a checkpoint. Each one appears when it is complete."""
        fetched = target.with_name(f"{_FETCHED}{target.name}")
        remove_tree(fetched)  # of a killed agent
        link_tree(make_manifest(entries), fetched, self._store.object_path)
        for folder in (fetched, target):
            folder.chmod(0o700)
        for entry in entries:
            discard(target / entry.path)  # a damaged one, which Windows does not replace if it is read-only
            replace_file(fetched / entry.path, target / entry.path)
        sync_path(target)
        remove_tree(fetched)

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

    def _parts_of(self, manifest: CheckpointManifest) -> list[int]:
        """Return the parts of a checkpoint that are here with the right size."""
        folder, here = self._folder_of(manifest.run, manifest.step), []
        for part in manifest.parts:
            with contextlib.suppress(OSError):
                if (folder / part.name).stat().st_size == part.size:
                    here.append(part.number)
        return here

    def _whole_parts(self, manifest: CheckpointManifest, wanted: Collection[int]) -> frozenset[int]:
        """Return which of these parts are here with the right hash."""
        folder, whole = self._folder_of(manifest.run, manifest.step), set()
        for part in manifest.parts:
            if part.number in wanted:
                with contextlib.suppress(OSError):
                    if entry_of(folder / part.name, part.name).object.hex() == part.file:
                        whole.add(part.number)
        return frozenset(whole)

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


def _state_files(manifest: CheckpointManifest, parts: Collection[int]) -> Mapping[str, str]:
    """Return the content id of each file with tensors, by name; of a checkpoint in parts only these parts."""
    if manifest.file is not None:
        return {STATE: manifest.file}
    return {part.name: part.file for part in manifest.parts if part.number in parts}


def _matches(files: FileList, expected: Mapping[str, str]) -> bool:
    """Tell whether files are those of a checkpoint, and nothing else."""
    contents = {entry.path: entry.object.hex() for entry in files.files if entry.path not in (MANIFEST, SEAL)}
    return contents == dict(expected) and bool(contents)
