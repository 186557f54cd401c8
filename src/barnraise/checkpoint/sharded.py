"""Sharded checkpoints of machines without a shared disk.

torch's distributed checkpoint (DCP) plans, writes and reshards; this module moves its files between machines.
The machines form a ring: each keeps the files of its own ranks, and copies of those of the machines before
it. Every rank decides from the same messages; an error on one rank is raised on all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from barnraise.checkpoint.dcp_io import FetchingReader, PathlessWriter, dcp_errors
from barnraise.checkpoint.shard_exchange import MachineRing, run_on_all_ranks
from barnraise.checkpoint.shard_files import (
    DRAFT,
    METADATA,
    SHARDED,
    FoundShards,
    HeldShards,
    ShardFile,
    ShardManifest,
    all_files,
    commit_draft,
    earlier_folders,
    encode_manifest,
    link_earlier_checkpoints,
    list_files,
    list_held_shards,
    newest_first,
    outdated_folders,
    plan_copies,
    plan_missing_files,
    prepare_folder,
    verified_files,
)
from barnraise.core.errors import BarnraiseError, RunError
from barnraise.core.files import remove_tree
from barnraise.runs.checkpoint_manifest import MOST_STEP
from barnraise.runs.record import MOST_MACHINES

log = logging.getLogger("barnraise.checkpoint")


def save_sharded(state: dict[str, Any], folder: str | Path, step: int, *, copies: int = 2) -> None:
    """Save a sharded checkpoint. All ranks call this together.

    ``state`` is what `torch.distributed.checkpoint.save` takes. Afterwards any ``copies - 1`` machines may be
    lost. Raise RunError, on every rank, if it was not saved.
    """
    if not 0 <= step <= MOST_STEP or not 1 <= copies <= MOST_MACHINES:
        raise RunError(f"step {step} cannot be saved in {copies} copies", hint="Save 1 copy or more.")
    ring = MachineRing.connect(_folder_of(folder), "save", step, copies)
    draft = ring.root / f"{DRAFT}{ring.token}"
    try:
        with dcp_errors(f"step {step} was not saved"):
            # Values that all ranks share go into one rank's file, which each machine has to fetch.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            writer = PathlessWriter(draft)
            save(state, storage_writer=writer, planner=planner, no_dist=not dist.is_initialized())
        listed = ring.gather_from_machines(lambda: list_files(draft), _file_lists)
        manifest = encode_manifest(ShardManifest(step=step, start=ring.start, files=all_files(listed)))
        ring.transfer(draft, plan_copies(listed, copies))
        ring.run_on_each_machine(lambda: commit_draft(draft, step, manifest))
        held = ring.gather_from_machines(lambda: list_held_shards(ring.root), _held_lists)
    except BarnraiseError:
        if ring.is_leader:
            remove_tree(draft)
        raise
    if ring.is_leader:
        for name in outdated_folders(held, ring.machine_of(ring.rank), manifest):
            remove_tree(ring.root / name)
    if ring.rank == 0 and copies > len(ring.leaders):
        log.info("step %d has %d copies instead of %d: one per machine", step, len(ring.leaders), copies)


def load_sharded(state: dict[str, Any], folder: str | Path) -> int | None:
    """Load the newest sharded checkpoint into ``state``. Return its step. All ranks call this together.

    Only a checkpoint counts of which every file is valid on some machine of the group. Return None if there
    is none. Raise RunError, on every rank, if it does not fit ``state``.
    """
    ring = MachineRing.connect(_folder_of(folder), "load", 0, 0)
    earlier = earlier_folders(os.environ, folder)
    if earlier:
        ring.run_on_each_machine(lambda: link_earlier_checkpoints(ring.root, earlier))
    for known in newest_first(ring.gather_from_machines(lambda: list_held_shards(ring.root), _held_lists)):
        checkpoint = known if known.missing else _verify(ring, known)
        if not checkpoint.missing:
            _restore(ring, checkpoint, state)
            if ring.rank == 0:
                log.warning("resuming from the sharded checkpoint of step %d", checkpoint.manifest.step)
            return checkpoint.manifest.step
        if ring.rank == 0:
            log.warning(
                "%s is skipped: no machine has a valid copy of %s", checkpoint.name, checkpoint.missing[0]
            )
    return None


def _verify(ring: MachineRing, known: FoundShards) -> FoundShards:
    """Return the checkpoint with only those holders whose file has the right hash."""
    folder = ring.root / known.name
    return known.held_by(ring.gather_from_machines(lambda: verified_files(folder, known), _numbers))


def _restore(ring: MachineRing, checkpoint: FoundShards, state: dict[str, Any]) -> None:
    """Load a checkpoint; each machine fetches only the files that its ranks read."""
    folder = ring.root / checkpoint.name
    ring.run_on_each_machine(lambda: prepare_folder(folder, checkpoint))
    ring.transfer(folder, plan_missing_files(checkpoint, [{METADATA} for _ in ring.leaders]))

    def fetch(names: Collection[str]) -> None:
        wanted: list[set[str]] = [set() for _ in ring.leaders]
        for rank, rank_names in enumerate(run_on_all_ranks(lambda: tuple(names), _names)):
            wanted[ring.machine_of(rank)] |= set(rank_names)
        ring.transfer(folder, plan_missing_files(checkpoint, wanted))

    with dcp_errors(f"step {checkpoint.manifest.step} cannot be loaded"):
        load(state, storage_reader=FetchingReader(folder, fetch), no_dist=not dist.is_initialized())


def _folder_of(folder: str | Path) -> Path:
    """Return the run's own folder, which survives a restart; an absolute path stays as it is."""
    kept = os.environ.get("BARNRAISE_CHECKPOINTS", "")
    return Path(kept, SHARDED, folder) if kept else Path(folder)


_file_lists: msgspec.msgpack.Decoder[tuple[ShardFile, ...]] = msgspec.msgpack.Decoder(tuple[ShardFile, ...])
_held_lists: msgspec.msgpack.Decoder[tuple[HeldShards, ...]] = msgspec.msgpack.Decoder(tuple[HeldShards, ...])
_numbers: msgspec.msgpack.Decoder[tuple[int, ...]] = msgspec.msgpack.Decoder(tuple[int, ...])
_names: msgspec.msgpack.Decoder[tuple[str, ...]] = msgspec.msgpack.Decoder(tuple[str, ...])
