"""Files of sharded checkpoints: what one machine has on its disk, and what several machines have together.

    step-00000042/__0_0.distcp ..    the shards of some ranks, as DCP writes them
    step-00000042/.metadata          DCP's own list of all shards
    step-00000042/manifest.json      every file of the whole checkpoint, with size and hash; written last

No machine needs all files of a checkpoint. Machines are numbered by their position in a ring.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Meta

from barnraise.core.decoding import decode
from barnraise.core.errors import CheckpointError, ProtocolError
from barnraise.core.files import remove_tree, sync_path
from barnraise.runs.checkpoint_manifest import Step, folder_name, folder_step

log = logging.getLogger("barnraise.checkpoint")

KEPT = 2
METADATA = ".metadata"
SHARDED = "sharded"  # the folder of them among a run's checkpoints
DRAFT = ".draft-"
_MANIFEST = "manifest.json"
_BAD = ".bad-"
_MAX_MANIFEST = 16 << 20
_MAX_FILES = 1 << 16

Start = Annotated[int, Meta(ge=0, le=1 << 40)]
_Name = Annotated[str, Meta(pattern=r"^(\.metadata|__[0-9]{1,6}_[0-9]{1,6}\.distcp)\Z")]
_Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Number = Annotated[int, Meta(ge=0, lt=_MAX_FILES)]


class ShardFile(msgspec.Struct, frozen=True):
    """One file of a checkpoint, which one or more machines hold."""

    name: _Name
    size: Annotated[int, Meta(ge=0, le=1 << 46)]
    hash: _Hex


class ShardManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a whole sharded checkpoint, equal on every machine.

    ``start``: how often the program was restarted.
    """

    format: Annotated[int, Meta(ge=1, le=1)] = 1
    step: Step
    start: Start
    files: Annotated[tuple[ShardFile, ...], Meta(min_length=1, max_length=_MAX_FILES)]


class HeldShards(msgspec.Struct, frozen=True, array_like=True):
    """The files of a checkpoint that a machine holds, by their index in the manifest."""

    manifest: Annotated[bytes, Meta(max_length=_MAX_MANIFEST)]
    files: Annotated[tuple[_Number, ...], Meta(max_length=_MAX_FILES)]


class FoundShards(NamedTuple):
    """A known checkpoint; ``holders``: for each file, the machines that hold it."""

    manifest: ShardManifest
    data: bytes
    holders: list[list[int]]

    @property
    def missing(self) -> list[str]:
        """Return the files that no machine holds."""
        return [file.name for file, held in zip(self.manifest.files, self.holders, strict=True) if not held]

    @property
    def name(self) -> str:
        return folder_name(self.manifest.step)

    def held_by(self, held: Sequence[Collection[int]]) -> FoundShards:
        """Return a copy with the files that each machine holds."""
        owned = [frozenset(numbers) for numbers in held]
        numbers = range(len(self.manifest.files))
        holders = [[machine for machine, own in enumerate(owned) if number in own] for number in numbers]
        return self._replace(holders=holders)


TransferPlan = Mapping[tuple[int, int], Sequence[ShardFile]]
"""The files to send, by (source machine, target machine)."""


# decisions from the lists of all machines


def all_files(listed: Sequence[Sequence[ShardFile]]) -> tuple[ShardFile, ...]:
    """Return the files of the whole checkpoint.

    Raise CheckpointError if two machines have a file of one name.
    """
    files = sorted((file for own in listed for file in own), key=lambda file: file.name)
    for file, next_file in pairwise(files):
        if file.name == next_file.name:
            raise CheckpointError(
                f"two machines wrote {file.name}", hint="Give each machine a folder of its own."
            )
    return tuple(files)


def plan_copies(listed: Sequence[Sequence[ShardFile]], copies: int) -> TransferPlan:
    """Plan to send each machine's files to the next ones in the ring, for ``copies`` copies."""
    count = len(listed)
    shifts = range(1, min(copies, count))
    return {
        (machine, (machine + shift) % count): listed[machine] for machine in range(count) for shift in shifts
    }


def newest_first(inventories: Sequence[Sequence[HeldShards]]) -> list[FoundShards]:
    """Return the known checkpoints. Of one step, the one of the later program start comes first."""
    held: dict[bytes, list[tuple[int, ...]]] = {}
    for machine, inventory in enumerate(inventories):
        for shards in inventory:
            held.setdefault(shards.manifest, [() for _ in inventories])[machine] = shards.files
    known = [FoundShards(read_manifest(data), data, []).held_by(files) for data, files in held.items()]
    return sorted(
        known,
        key=lambda checkpoint: (checkpoint.manifest.step, checkpoint.manifest.start, checkpoint.data),
        reverse=True,
    )


def outdated_folders(inventories: Sequence[Sequence[HeldShards]], machine: int, newest: bytes) -> list[str]:
    """Return the folders that a machine can delete; the last few complete checkpoints stay."""
    complete = [checkpoint.data for checkpoint in newest_first(inventories) if not checkpoint.missing]
    kept = {newest, *complete[:KEPT]}
    deletable = [shards.manifest for shards in inventories[machine] if shards.manifest not in kept]
    return [folder_name(read_manifest(data).step) for data in deletable]


def plan_missing_files(checkpoint: FoundShards, wanted: Sequence[Collection[str]]) -> TransferPlan:
    """Plan from which machine each one gets the files that it wants; holders take turns."""
    plan: dict[tuple[int, int], list[ShardFile]] = {}
    for file, holders in zip(checkpoint.manifest.files, checkpoint.holders, strict=True):
        for machine, names in enumerate(wanted):
            if file.name in names and machine not in holders:
                plan.setdefault((holders[machine % len(holders)], machine), []).append(file)
    return plan


def encode_manifest(manifest: ShardManifest) -> bytes:
    """Encode a manifest as JSON."""
    return msgspec.json.encode(manifest)


def read_manifest(data: bytes) -> ShardManifest:
    """Decode a manifest from JSON. Raise ProtocolError if it is invalid."""
    return decode(_manifests, data, "the manifest of a checkpoint cannot be read")


# files of this machine


def earlier_folders(environment: Mapping[str, str], folder: str | Path) -> list[Path]:
    """Return the folders of the runs that this run resumes, newest first."""
    kept, runs = environment.get("BARNRAISE_CHECKPOINTS", ""), environment.get("BARNRAISE_RESUMES", "")
    if not kept or not runs or Path(folder).is_absolute():
        return []
    own = Path(kept)
    return [own.parent.parent / run / own.name / SHARDED / folder for run in runs.split(",")]


def link_earlier_checkpoints(root: Path, earlier: Sequence[Path]) -> None:
    """Link the checkpoints of the last earlier run that has any, if this run has none."""
    if any(folder_step(folder.name) is not None for folder in root.iterdir()):
        return
    for earlier_run in earlier:
        folders = (
            [folder for folder in earlier_run.iterdir() if folder_step(folder.name)]
            if earlier_run.is_dir()
            else []
        )
        for folder in folders:
            draft = root / f"{DRAFT}{secrets.token_hex(8)}"
            draft.mkdir(mode=0o700)
            for path in folder.iterdir():
                if not path.name.startswith(_BAD):
                    _link(path, draft / path.name)
            draft.rename(root / folder.name)
        if folders:
            return


def list_files(draft: Path) -> list[ShardFile]:
    """Return the files of a draft with size and hash; this reads all of them."""
    return [ShardFile(path.name, path.stat().st_size, _hash_of(path)) for path in draft.iterdir()]


def commit_draft(draft: Path, step: int, manifest: bytes) -> None:
    """Turn a draft into a checkpoint, atomically."""
    (draft / _MANIFEST).write_bytes(manifest)
    sync_path(draft / _MANIFEST)
    sync_path(draft)
    target = draft.with_name(folder_name(step))
    remove_tree(target)
    draft.rename(target)
    sync_path(target.parent)


def prepare_folder(folder: Path, checkpoint: FoundShards) -> None:
    """Create the folder for a checkpoint that this machine does not have yet."""
    if not _has_manifest_of(folder, checkpoint):
        draft = folder.with_name(f"{DRAFT}{secrets.token_hex(8)}")
        draft.mkdir(mode=0o700)
        commit_draft(draft, checkpoint.manifest.step, checkpoint.data)


def list_held_shards(root: Path) -> list[HeldShards]:
    """List the checkpoints on this machine. Files count by size; invalid manifests are logged."""
    held = []
    for folder in sorted(root.iterdir()):
        step = folder_step(folder.name)
        if step is None:
            continue
        try:
            data = _manifest_data(folder)
            manifest = read_manifest(data)
            if manifest.step != step:
                raise ProtocolError(f"its manifest is for step {manifest.step}")
        except (OSError, ProtocolError) as error:
            log.warning("%s on this machine is skipped: %s", folder.name, getattr(error, "message", error))
            continue
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        here = [number for number, file in enumerate(manifest.files) if sizes.get(file.name) == file.size]
        held.append(HeldShards(data, tuple(here)))
    return held


def verified_files(folder: Path, checkpoint: FoundShards) -> list[int]:
    """Return the indexes of files with the right hash; others are renamed and logged."""
    if not _has_manifest_of(folder, checkpoint):
        return []
    whole = []
    for number, file in enumerate(checkpoint.manifest.files):
        path = folder / file.name
        if not path.exists():
            continue
        if is_valid(path, file):
            whole.append(number)
        else:
            log.warning(
                "%s of %s on this machine does not have the hash of its manifest", file.name, folder.name
            )
            path.replace(path.with_name(f"{_BAD}{file.name}"))
    return whole


def is_valid(path: Path, file: ShardFile) -> bool:
    """Tell whether a file has the size and hash of its manifest entry."""
    return path.stat().st_size == file.size and _hash_of(path) == file.hash


def _has_manifest_of(folder: Path, checkpoint: FoundShards) -> bool:
    return (folder / _MANIFEST).exists() and _manifest_data(folder) == checkpoint.data


def _manifest_data(folder: Path) -> bytes:
    if (folder / _MANIFEST).stat().st_size > _MAX_MANIFEST:
        raise ProtocolError("its manifest is too large")
    return (folder / _MANIFEST).read_bytes()


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, target)


def _hash_of(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


_manifests: msgspec.json.Decoder[ShardManifest] = msgspec.json.Decoder(ShardManifest)
