"""Source of an offline conversion: one complete sharded checkpoint, whose files lie in one or more folders.

Its tensors are read in parts, so that no more than a part of one tensor and a saved shard are in memory.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from barnraise.checkpoint.shard_files import (
    METADATA,
    FoundShards,
    ShardManifest,
    is_valid,
    list_held_shards,
    newest_first,
)
from barnraise.core.errors import CheckpointError

log = logging.getLogger("barnraise.checkpoint")

_MORE_FOLDERS = "Name the folders of the other machines, too: each machine has a part of the files."


class FoundFiles(NamedTuple):
    """A complete checkpoint on this disk; ``folders``: for each of its files, a folder that has it whole."""

    manifest: ShardManifest
    folders: Mapping[str, Path]


def find_checkpoint(roots: Sequence[Path], step: int | None = None) -> FoundFiles:
    """Return the newest complete checkpoint in these folders, or the one of a step.

    Raise CheckpointError if no such checkpoint has a valid copy of each file.
    """
    why = "there is no sharded checkpoint"
    for checkpoint in newest_first([list_held_shards(root) for root in roots]):
        if step is not None and checkpoint.manifest.step != step:
            continue
        folders = _valid_files(roots, checkpoint)
        missing = [file.name for file in checkpoint.manifest.files if file.name not in folders]
        if not missing:
            return FoundFiles(checkpoint.manifest, folders)
        why = f"{checkpoint.name} is not complete: no folder has a valid copy of {missing[0]}"
        log.warning("%s", why)
    wanted = "" if step is None else f" of step {step}"
    places = ", ".join(map(str, roots))
    raise CheckpointError(f"no complete checkpoint{wanted} in {places}: {why}", hint=_MORE_FOLDERS)


def _valid_files(roots: Sequence[Path], checkpoint: FoundShards) -> dict[str, Path]:
    folders = {}
    for file, machines in zip(checkpoint.manifest.files, checkpoint.holders, strict=True):
        for machine in machines:
            folder = roots[machine] / checkpoint.name
            if is_valid(folder / file.name, file):
                folders[file.name] = folder
                break
    return folders


class ShardSource:
    """Reader of a found checkpoint: its tensors by chunk, and its other values as their saved bytes."""

    def __init__(self, files: FoundFiles) -> None:
        """Read the list of shards. It is a pickle of torch: its sender can run code here."""
        self.files = files
        self._readers = {folder: FileSystemReader(folder) for folder in set(files.folders.values())}
        home = files.folders.get(METADATA)
        if home is None:
            raise CheckpointError(f"the checkpoint has no {METADATA}", hint="Use another checkpoint.")
        self.metadata = self._readers[home].read_metadata()
        for reader in self._readers.values():
            reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return size and type of each tensor, by its name."""
        entries = self.metadata.state_dict_metadata.items()
        return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def read_chunk(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """Read a part of a tensor, from as many shards as it needs."""
        entry = self.tensors[name]
        target = torch.empty(chunk.sizes, dtype=entry.properties.dtype)
        self._read(create_read_items_for_chunk_list(name, entry, [chunk]), _ChunkPlanner(target))
        return target

    def read_bytes(self, name: str) -> bytes:
        """Read a value that is no tensor, as torch has saved it. It is not unpickled."""
        index, none = MetadataIndex(name), torch.Size((0,))
        planner = _ChunkPlanner(torch.empty(0))
        self._read([ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)], planner)
        return planner.data

    def _read(self, items: Sequence[ReadItem], planner: _ChunkPlanner) -> None:
        by_folder: dict[Path, list[ReadItem]] = {}
        for item in items:
            name = self.metadata.storage_data[item.storage_index].relative_path
            folder = self.files.folders.get(name)
            if folder is None:
                raise CheckpointError(
                    f"the checkpoint names a file {name!r} that its manifest does not have",
                    hint="Use another checkpoint.",
                )
            by_folder.setdefault(folder, []).append(item)
        for folder, wanted in by_folder.items():
            self._readers[folder].read_data(LoadPlan(wanted), planner).wait()


class _ChunkPlanner(DefaultLoadPlanner):
    """Planner of torch that reads into one tensor, and keeps other values as bytes."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target
        self.data = b""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._target
        for dimension, (first, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dimension, first, length)
        return part

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.data = value.getvalue()
