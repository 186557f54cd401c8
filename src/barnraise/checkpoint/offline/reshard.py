"""Writes a found checkpoint in another form: as shards of any number of ranks, or as one safetensors file.

torch plans and writes the shards, as if the ranks saved one after the other.
"""

from __future__ import annotations

import dataclasses
import io
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from barnraise.checkpoint.dcp_io import PathlessWriter
from barnraise.checkpoint.offline.source import ShardSource
from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.checkpoint.shard_files import (
    DRAFT,
    ShardManifest,
    all_files,
    commit_draft,
    encode_manifest,
    list_files,
)
from barnraise.core.errors import CheckpointError
from barnraise.core.files import remove_tree, write_atomically
from barnraise.runs.checkpoint_manifest import folder_name

_SAFETENSORS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALIGNMENT = 8


def write_shards(source: ShardSource, target: Path, count: int) -> Path:
    """Write the checkpoint as ``count`` ranks would save it, and return its folder.

    It is a sharded checkpoint like any other: `load_sharded` loads it. Raise CheckpointError if the target
    has a checkpoint of this step.
    """
    manifest = source.files.manifest
    folder = target / folder_name(manifest.step)
    if folder.exists():
        raise CheckpointError(f"{folder} exists already", hint="Name another folder, or remove it.")
    target.mkdir(parents=True, exist_ok=True)
    draft = target / f"{DRAFT}{secrets.token_hex(8)}"
    draft.mkdir(mode=0o700)
    try:
        _save_all_ranks(source, draft, count)
        files = all_files([list_files(draft)])
        written = ShardManifest(step=manifest.step, start=manifest.start, files=files)
        commit_draft(draft, manifest.step, encode_manifest(written))
    finally:
        remove_tree(draft)
    return folder


def _save_all_ranks(source: ShardSource, draft: Path, count: int) -> None:
    writer, planner = PathlessWriter(draft), _ReshardPlanner(source)
    writer.set_up_storage_writer(is_coordinator=True)
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    local = [writer.prepare_local_plan(plan) for plan in plan_ranks(source, count)]
    plans, metadata = planner.create_global_plan(local)
    results = []
    for plan in writer.prepare_global_plan(plans):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    # How names follow from nested keys is not changed by the shards.
    writer.finish(dataclasses.replace(metadata, planner_data=source.metadata.planner_data), results)


def plan_ranks(source: ShardSource, count: int) -> list[SavePlan]:
    """Return what each rank writes: its rows of every tensor, as FSDP would shard them.

    Tensors with fewer rows than ranks go to the first ones, and single numbers to the ranks in turn.
    """
    items: list[list[WriteItem]] = [[] for _ in range(count)]
    tensors = source.tensors
    for place, (name, entry) in enumerate(tensors.items()):
        chunks = row_chunks(entry.size, count)
        first = place % count if len(chunks) == 1 else 0
        for number, chunk in enumerate(chunks):
            data = TensorWriteData(chunk=chunk, properties=entry.properties, size=entry.size)
            index = MetadataIndex(name, chunk.offsets)
            items[first + number].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    for name in source.metadata.state_dict_metadata:
        if name not in tensors:
            items[0].append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
    return [SavePlan(own) for own in items]


def row_chunks(size: torch.Size, count: int) -> list[ChunkStorageMetadata]:
    """Return at most ``count`` chunks of the rows of a tensor, as `torch.chunk` cuts them."""
    none = [0] * len(size)
    if not size or not size.numel():
        return [ChunkStorageMetadata(torch.Size(none), size)]
    rows, step = size[0], -(-size[0] // count)
    return [
        ChunkStorageMetadata(torch.Size([first, *none[1:]]), torch.Size([min(step, rows - first), *size[1:]]))
        for first in range(0, rows, step)
    ]


class _ReshardPlanner(DefaultSavePlanner):
    """Planner of torch whose data is read from another checkpoint when it is written."""

    def __init__(self, source: ShardSource) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._source = source

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.tensor_data is None:
            return io.BytesIO(self._source.read_bytes(name))
        return self._source.read_chunk(name, write_item.tensor_data.chunk)


# one file


def write_safetensors(source: ShardSource, path: Path, prefix: str, info: Mapping[str, str]) -> int:
    """Write the tensors whose names start with ``prefix``, without it, and return their number.

    One tensor at a time is in memory. Raise CheckpointError if there is none, or one of another type.
    """
    tensors = {
        name.removeprefix(prefix): entry for name, entry in source.tensors.items() if name.startswith(prefix)
    }
    if not tensors:
        known = ", ".join(sorted({name.rpartition(".")[0] for name in source.tensors})[:5])
        raise CheckpointError(
            f"no tensor of the checkpoint has a name that starts with {prefix!r}",
            hint=f"Its names start with: {known}.",
        )
    # As safetensors itself orders them, so that each tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].properties.dtype.itemsize, name))
    header = _header({name: tensors[name] for name in order}, info)

    def parts() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little")
        yield header
        for name in order:
            size = tensors[name].size
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            yield tensor_bytes(source.read_chunk(prefix + name, whole))

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, parts(), synced=True)
    return len(order)


def _header(tensors: Mapping[str, TensorStorageMetadata], info: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(info)}
    end = 0
    for name, entry in tensors.items():
        dtype = entry.properties.dtype
        if dtype not in _SAFETENSORS:
            raise CheckpointError(
                f"{name} is a {dtype} tensor, which safetensors cannot hold",
                hint="Write shards instead: leave --safetensors out.",
            )
        first, end = end, end + entry.size.numel() * dtype.itemsize
        entries[name] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": list(entry.size),
            "data_offsets": [first, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
