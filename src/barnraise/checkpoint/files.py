"""Checkpoint files: each checkpoint is a folder that appears atomically, complete and signed.

See `runs.checkpoint_manifest`. A checkpoint that is incomplete, modified, of another run or wrongly signed is
skipped with a warning. The one before it is used instead.
"""

from __future__ import annotations

import base64
import glob
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from barnraise.artifacts.store.linked_files import entry_of
from barnraise.checkpoint.serialization import FlatState, digest
from barnraise.checkpoint.signer import CheckpointSigner
from barnraise.core import metrics
from barnraise.core.errors import BarnraiseError, CheckpointError, RunError
from barnraise.core.files import discard, remove_tree, replace, sync_path
from barnraise.core.metrics import catalogue
from barnraise.runs.checkpoint_manifest import (
    MANIFEST,
    SEAL,
    STATE,
    CheckpointManifest,
    encode,
    fingerprint,
    folder_name,
    folder_step,
    load_manifest,
    modification_times,
    outdated_folders,
    to_held_checkpoint,
)
from barnraise.runs.record import MOST_MACHINES

log = logging.getLogger("barnraise.checkpoint")

DRAFT = ".draft-"
_OLDER = "An older checkpoint is used instead."

T = TypeVar("T")


class CheckpointInfo(NamedTuple):
    """Facts about a checkpoint that its manifest states."""

    step: int
    generation: int
    provisional: bool
    copies: int = 2


class Checkpoints:
    """Checkpoints of one run in one folder. A background thread saves, one at a time.

    ``before_seal`` is called on that thread before a checkpoint becomes valid.
    """

    def __init__(self, folder: Path, run: str, signer: CheckpointSigner) -> None:
        self.run = run
        self.folder = folder
        self._signer = signer
        self._writing: threading.Thread | None = None
        self.before_seal: Callable[[], None] = lambda: None
        self._last: str | None = None

    @property
    def is_busy(self) -> bool:
        """Return True while a checkpoint is being written."""
        return self._writing is not None and self._writing.is_alive()

    def save(self, parts: FlatState, info: CheckpointInfo) -> None:
        """Copy the state and start to write it. Do nothing while another one is being written."""
        if self.is_busy:
            return
        copy = FlatState(parts.skeleton, [tensor.detach().to("cpu", copy=True) for tensor in parts.tensors])
        self._writing = threading.Thread(target=self._write, args=(copy, info), name="barnraise-checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Wait until the current checkpoint is on the disk."""
        if self._writing is not None:
            self._writing.join()

    def manifests(self) -> list[tuple[CheckpointManifest, Path]]:
        """Return the manifests of this folder, provisional ones last, and where they are. Newest first.

        Tensors are not verified. Log which manifests are invalid, and why.
        """
        known = []
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            if folder_step(folder.name) is not None:
                manifest = self._try(folder, self._manifest)
                known += [(manifest, folder)] if manifest is not None else []
        return sorted(known, key=lambda pair: _order(pair[0]), reverse=True)

    def newest(self) -> tuple[CheckpointManifest, FlatState] | None:
        """Return the newest valid checkpoint in one file, provisional ones last. Log which are skipped."""
        for manifest, folder in self.manifests():
            checkpoint = self._try(folder, self.read) if manifest.file is not None else None
            if checkpoint is not None:
                return checkpoint
        return None

    def read(self, folder: Path) -> tuple[CheckpointManifest, FlatState]:
        """Read a checkpoint from disk.

        Raise RunError if it is damaged, of another run, or wrongly signed.
        """
        manifest = self._manifest(folder)
        try:
            if entry_of(folder / STATE, STATE).object.hex() != manifest.file:
                raise CheckpointError("its contents do not have the hash of its manifest", hint=_OLDER)
            skeleton = base64.b64decode(manifest.skeleton, validate=True)
            loaded = load_file(folder / STATE)
            tensors = [loaded[f"t{number}"] for number in range(len(loaded))]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"it cannot be read ({error})", hint=_OLDER) from error
        return manifest, FlatState(skeleton, tensors)

    def _manifest(self, folder: Path) -> CheckpointManifest:
        return load_manifest(folder, self.run, self._signer.signers(self.run))

    def _try(self, folder: Path, reading: Callable[[Path], T]) -> T | None:
        """Return the result, or None with a warning if the checkpoint is invalid."""
        try:
            return reading(folder)
        except RunError as error:
            log.warning("%s is skipped: %s", folder.name, error.message)
            return None

    def _write(self, parts: FlatState, info: CheckpointInfo) -> None:
        draft = self.folder / f"{DRAFT}{info.step:08}"
        start = time.monotonic()
        try:
            for left in self.folder.glob(f"{DRAFT}*"):  # of a killed process
                remove_tree(left)
            draft.mkdir(parents=True)
            tensors = {f"t{number}": tensor for number, tensor in enumerate(parts.tensors)}
            save_file(without_aliases(tensors), draft / STATE)
            name = digest(parts).hex()
            manifest = CheckpointManifest(
                run=self.run,
                step=info.step,
                generation=info.generation,
                digest=name,
                previous=self._last,
                file=entry_of(draft / STATE, STATE).object.hex(),
                skeleton=base64.b64encode(parts.skeleton).decode(),
                provisional=info.provisional,
                copies=max(1, min(info.copies, MOST_MACHINES)),
            )
            data = encode(manifest)
            (draft / MANIFEST).write_bytes(data)
            self.before_seal()
            (draft / SEAL).write_bytes(encode(self._signer.sign(info.step, fingerprint(data))))
            for file in draft.iterdir():
                sync_path(file)
            target = self.folder / folder_name(info.step)
            remove_tree(target)
            replace(draft, target)
            sync_path(self.folder)
            self._last = name
            metrics.counter(catalogue.CHECKPOINTS).inc()
            metrics.histogram(catalogue.CHECKPOINT_TIME).observe(time.monotonic() - start)
            for old in outdated_folders(modification_times(self.folder), keep=info.step):
                remove_tree(self.folder / old)
        except (OSError, SafetensorError, BarnraiseError) as error:  # also raised when the disk is full
            reason = getattr(error, "strerror", None) or getattr(error, "message", None) or error
            # At once: after the last checkpoint of a run there is no other occasion.
            log.warning(
                "the checkpoint of step %d was not written: %s in %s", info.step, reason, self.folder
            )
            remove_tree(draft)


def _order(manifest: CheckpointManifest) -> tuple[bool, tuple[int, int]]:
    held = to_held_checkpoint(manifest)
    return held.agreed, held.age


def write_model(tensors: Mapping[str, torch.Tensor], path: Path, info: Mapping[str, str]) -> None:
    """Write parameters and buffers as safetensors, atomically."""
    with model_draft(path) as draft:
        save_file(without_aliases(tensors), draft, metadata=dict(info))


@contextmanager
def model_draft(path: Path) -> Iterator[Path]:
    """Give a draft to be written, which replaces the file in the end.

    Several machines may write the same file in a shared folder.
    """
    ours = f"{path.name}.draft-{platform.node()}-"
    for left in path.parent.glob(f"{glob.escape(ours)}*"):  # of a killed process
        writer = left.name.removeprefix(ours)
        if writer.isdecimal() and not psutil.pid_exists(int(writer)):
            left.unlink(missing_ok=True)
    draft = path.with_name(f"{ours}{os.getpid()}")
    try:
        yield draft
        sync_path(draft)
        replace(draft, path)
    except BaseException:
        discard(draft)
        raise


def without_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, contiguous and on the CPU; copy only what shares memory with an earlier one.

    safetensors rejects tensors that share memory. A copy of all would double the memory of a large model.
    """
    result: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage().data_ptr()
        result[name] = dense.clone() if storage in seen else dense
        seen.add(storage)
    return result
