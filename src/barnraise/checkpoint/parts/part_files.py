"""Files of a checkpoint in parts. See `runs.checkpoint_manifest`.

The workers of a machine write parts into one draft. When the workers of all machines have written theirs, one
worker of each machine adds the manifest and its machine's signature. So a machine that dies before leaves a
draft, and an older checkpoint stays the newest one that is complete.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from barnraise.artifacts.store.linked_files import entry_of
from barnraise.checkpoint.files import DRAFT, CheckpointInfo, Checkpoints, without_aliases
from barnraise.checkpoint.serialization import FlatState, flatten, unflatten
from barnraise.checkpoint.signer import CheckpointSigner
from barnraise.core import metrics
from barnraise.core.errors import ProtocolError, RunError
from barnraise.core.files import discard, remove_tree, replace, sync_path
from barnraise.core.metrics import catalogue
from barnraise.runs.checkpoint_manifest import (
    KEPT_IN_PARTS,
    MANIFEST,
    SEAL,
    CheckpointManifest,
    CheckpointPart,
    encode,
    fingerprint,
    folder_name,
    load_manifest,
    modification_times,
    outdated_folders,
    part_name,
)
from barnraise.runs.record import MOST_MACHINES

_SKELETON = "skeleton"
_OTHERS = "Another machine may have a copy of it."


class WrittenParts(NamedTuple):
    """Parts that were written for a checkpoint. ``skeleton``: what belongs to no part, as `flatten` gives it.

    ``previous``: digest of the checkpoint before it, if one is known.
    """

    parts: Sequence[CheckpointPart]
    skeleton: bytes
    previous: str | None = None

    @property
    def digest(self) -> str:
        """Return the hash of the whole state."""
        hasher = blake3(self.skeleton)
        for part in self.parts:
            hasher.update(f"{part.number} {part.file}\0".encode())
        return hasher.hexdigest()


class PartFiles:
    """Checkpoints in parts of one run, in the folder of its checkpoints on this machine."""

    def __init__(self, checkpoints: Checkpoints, signer: CheckpointSigner) -> None:
        self._checkpoints, self._signer = checkpoints, signer
        self._folder = checkpoints.folder

    def remove_drafts(self, info: CheckpointInfo) -> None:
        """Remove what killed processes left of other checkpoints. One worker of each machine calls it."""
        own = self._draft(info)
        for left in self._folder.glob(f"{DRAFT}*"):
            if left != own:
                remove_tree(left)

    def write(self, info: CheckpointInfo, number: int, states: Any) -> CheckpointPart:
        """Write a part into the draft of a checkpoint."""
        draft = self._draft(info)
        draft.mkdir(parents=True, exist_ok=True)
        parts = flatten(states)
        tensors = {f"t{place}": tensor for place, tensor in enumerate(parts.tensors)}
        path = draft / part_name(number)
        try:
            skeleton = base64.b64encode(parts.skeleton).decode()
            save_file(without_aliases(tensors), path, metadata={_SKELETON: skeleton})
            sync_path(path)
            entry = entry_of(path, path.name)
        except SafetensorError as error:  # also raised when the disk is full
            raise OSError(str(error)) from error
        return CheckpointPart(number, entry.size, entry.object.hex())

    def seal(self, info: CheckpointInfo, written: WrittenParts, own: Collection[CheckpointPart]) -> None:
        """Turn the draft into a checkpoint. ``own``: what the workers of this machine have written."""
        draft = self._draft(info)
        for part in set(own).difference(written.parts):  # the bits of another machine count
            discard(draft / part.name)
        manifest = CheckpointManifest(
            run=self._checkpoints.run,
            step=info.step,
            generation=info.generation,
            digest=written.digest,
            previous=written.previous,
            skeleton=base64.b64encode(written.skeleton).decode(),
            parts=tuple(written.parts),
            provisional=info.provisional,
            copies=max(1, min(info.copies, MOST_MACHINES)),
        )
        data = encode(manifest)
        (draft / MANIFEST).write_bytes(data)
        self._checkpoints.before_seal()
        (draft / SEAL).write_bytes(encode(self._signer.sign(info.step, fingerprint(data))))
        for name in (MANIFEST, SEAL):
            sync_path(draft / name)
        sync_path(draft)
        target = self._folder / folder_name(info.step)
        remove_tree(target)
        replace(draft, target)
        sync_path(self._folder)
        metrics.counter(catalogue.CHECKPOINTS).inc()

    def drop(self, info: CheckpointInfo) -> None:
        """Remove a draft that does not become a checkpoint."""
        remove_tree(self._draft(info))

    def remove_outdated(self, step: int) -> None:
        """Remove old checkpoints of this machine, after the one of this step is complete on all machines."""
        if self._folder.is_dir():
            for old in outdated_folders(modification_times(self._folder), step, KEPT_IN_PARTS):
                remove_tree(self._folder / old)

    def manifest(self, step: int) -> CheckpointManifest:
        """Return the manifest of a checkpoint on this disk. Raise RunError if it is not valid."""
        signers = self._signer.signers(self._checkpoints.run)
        return load_manifest(self._folder / folder_name(step), self._checkpoints.run, signers)

    def read(self, manifest: CheckpointManifest, number: int) -> Any:
        """Return the states in a part. Raise RunError if it is damaged, or not here.

        The tensors are those of the mapped file: take copies of what has to stay.
        """
        part = next((each for each in manifest.parts if each.number == number), None)
        if part is None:
            raise RunError(f"the checkpoint of step {manifest.step} has no part {number}", hint=_OTHERS)
        path = self._folder / folder_name(manifest.step) / part.name
        verify_part(path, part)
        with open_part(path) as (skeleton, tensors):
            return unflatten(skeleton, tensors)

    def _draft(self, info: CheckpointInfo) -> Path:
        return self._folder / f"{DRAFT}{info.generation}-{info.step:08}"


def shared_state(manifest: CheckpointManifest) -> Any:
    """Return what belongs to no part, such as learning rates. Raise RunError if it cannot be read."""
    try:
        return unflatten(base64.b64decode(manifest.skeleton, validate=True), [])
    except (ValueError, ProtocolError) as error:
        why = f"the manifest of step {manifest.step} has no state ({error})"
        raise RunError(why, hint=_OTHERS) from error


def verify_part(path: Path, part: CheckpointPart) -> None:
    """Raise RunError unless a file is this part."""
    try:
        content = entry_of(path, path.name).object.hex()
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror or error})", hint=_OTHERS) from error
    if content != part.file:
        raise RunError(f"{path} does not have the hash of its manifest", hint=_OTHERS)


@contextmanager
def open_part(path: Path) -> Iterator[FlatState]:
    """Give the skeleton and the tensors of a part whose hash was compared. Raise RunError if it has none."""
    try:
        with safe_open(path, framework="pt") as opened:
            skeleton = base64.b64decode((opened.metadata() or {})[_SKELETON], validate=True)
            names: list[str] = list(opened.keys())
            tensors: list[torch.Tensor] = [opened.get_tensor(f"t{place}") for place in range(len(names))]
            yield FlatState(skeleton, tensors)
    except (KeyError, ValueError, SafetensorError, ProtocolError) as error:
        raise RunError(f"{path} cannot be read ({error})", hint=_OTHERS) from error
