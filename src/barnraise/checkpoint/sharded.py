"""Sharded checkpoints of machines without a shared disk.

torch's distributed checkpoint (DCP) plans, writes and reshards; this module moves its files between machines.
The machines form a ring: each keeps the files of its own ranks, and copies of those of the machines before
it. Every rank decides from the same messages; an error on one rank is raised on all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from barnraise.checkpoint.dcp_io import FetchingReader, PathlessWriter, dcp_errors, stage
from barnraise.checkpoint.shard_exchange import MachineRing, error_text, run_on_all_ranks
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
from barnraise.core.errors import BarnraiseError, CheckpointError
from barnraise.core.files import remove_tree
from barnraise.core.flow.background import BackgroundCall
from barnraise.core.flow.wait_reporter import WaitReporter
from barnraise.runs.checkpoint_manifest import MOST_STEP
from barnraise.runs.record import MOST_MACHINES

log = logging.getLogger("barnraise.checkpoint")

_PATIENCE_S = 3600.0
_REPORT_S = 10.0
_unfinished: list[ShardedSave] = []  # in the background; at most one
_groups: list[dist.ProcessGroup | None] = []  # the program's, and one for saves in the background


class ShardedSave:
    """Handle of a sharded save, which may still run in the background."""

    def __init__(self, step: int, call: BackgroundCall[None] | None = None) -> None:
        """Set the handle up. ``call``: the save; None if it has ended already."""
        self.step, self._call = step, call

    def done(self) -> bool:
        """Return True once the save has ended, with or without an error."""
        return self._call is None or self._call.has_ended

    def wait(self, timeout: float = _PATIENCE_S) -> None:
        """Wait until the checkpoint is saved, at most ``timeout`` seconds.

        Raise CheckpointError if it was not saved, or takes longer.
        """
        if self._call is None:
            return
        reporter, deadline = WaitReporter(_REPORT_S, _REPORT_S), time.monotonic() + timeout
        while not self.done():
            if (left := deadline - time.monotonic()) <= 0:
                raise CheckpointError(
                    f"the save of step {self.step} has not ended after {timeout:g} s",
                    hint="Wait longer, or see whether a rank stands still.",
                )
            self._call.wait(min(left, 1.0))
            if not self.done() and reporter.is_due():
                log.warning("waiting for %.0f s for the save of step %d", reporter.waited_s, self.step)
        self._call.result()


def save_sharded(
    state: dict[str, Any], folder: str | Path, step: int, *, copies: int = 2, is_async: bool = False
) -> ShardedSave:
    """Save a sharded checkpoint. All ranks call this together.

    ``state`` is what `torch.distributed.checkpoint.save` takes. Afterwards any ``copies - 1`` machines may be
    lost. ``is_async``: copy the state to main memory, and save it while training goes on; wait for the handle
    before the group is destroyed. Raise CheckpointError, on every rank, if it was not saved.
    """
    if not 0 <= step <= MOST_STEP or not 1 <= copies <= MOST_MACHINES:
        raise CheckpointError(f"step {step} cannot be saved in {copies} copies", hint="Save 1 copy or more.")
    _await_background()
    action = "save in the background" if is_async else "save"
    ring = MachineRing.connect(_folder_of(folder), action, step, copies)
    if not is_async:
        _save(ring, state, step, copies)
        return ShardedSave(step)
    staged: list[dict[str, Any]] = []

    def copy() -> tuple[int, ...]:
        staged.append(stage(state))
        return ()

    run_on_all_ranks(copy, _numbers)
    background = ring.over(_background_group())
    work = partial(_save_and_report, background, staged, step, copies)
    handle = ShardedSave(step, BackgroundCall(work, "barnraise-sharded-save", is_daemon=False))
    _unfinished.append(handle)
    return handle


def _save(ring: MachineRing, state: dict[str, Any], step: int, copies: int) -> None:
    draft = ring.root / f"{DRAFT}{ring.token}"
    try:
        with dcp_errors(f"step {step} was not saved"):
            # Values that all ranks share go into one rank's file, which each machine has to fetch.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            save(
                state,
                storage_writer=PathlessWriter(draft),
                planner=planner,
                process_group=ring.group,
                no_dist=not dist.is_initialized(),
            )
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


def _save_and_report(ring: MachineRing, staged: list[dict[str, Any]], step: int, copies: int) -> None:
    """Save in the background. ``staged`` gives the copy of the state away, so that its memory is freed."""
    try:
        _save(ring, staged.pop(), step, copies)
    except Exception as error:  # the handle raises it again, but the script may never ask it
        log.warning("the sharded checkpoint of step %d was not saved: %s", step, error_text(error))
        raise


def _await_background() -> None:
    """Wait for the save in the background: its messages and those of another would mix."""
    while _unfinished:
        handle = _unfinished[0]
        try:
            handle.wait()
        except Exception as error:  # noqa: BLE001 - it was logged, and its own handle raises it
            if not handle.done():
                raise
            log.debug("the save of step %d failed: %s", handle.step, error)
        _unfinished.remove(handle)


def _background_group() -> dist.ProcessGroup | None:
    """Return a second group of all ranks, which is made once for each group of the program."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if not _groups or _groups[0] is not world:
        _groups[:] = [world, dist.new_group()]
    return _groups[1]


def load_sharded(state: dict[str, Any], folder: str | Path) -> int | None:
    """Load the newest sharded checkpoint into ``state``. Return its step. All ranks call this together.

    Only a checkpoint counts of which every file is valid on some machine of the group. Return None if there
    is none. Raise CheckpointError, on every rank, if it does not fit ``state``.
    """
    _await_background()
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
