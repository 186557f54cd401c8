"""Exports the newest model of a hub as a file, without a training machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from barnraise.checkpoint.files import write_model
from barnraise.core.errors import HubError
from barnraise.hub.protocol.messages import RoundConfig, VectorLayout
from barnraise.hub.protocol.vector_file import VectorForm, add_vector
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import FOUNDING, HubFounding, hub_blobs
from barnraise.hub.storage.log import CommittedRound, HubLog, HubSnapshot, read_fact
from barnraise.hub.storage.versions import steps_after

FILE_NAME = "model.safetensors"
_TRIES = 5  # a hub that runs may commit meanwhile, and drop what was just named


def export_model(directory: Path, target: Path) -> int:
    """Write the newest version completely or not at all, and return its number. The hub may be running."""
    for _ in range(_TRIES):
        snapshot = _read(directory)
        founding, layout = (
            read_fact(snapshot.facts, FOUNDING, HubFounding),
            read_fact(snapshot.facts, "layout", VectorLayout),
        )
        if founding is None or layout is None or not snapshot.versions:
            raise HubError(
                f"the run in {directory} has no model yet",
                hint="Start it with `barnraise hub up`, and see `barnraise hub status`.",
            )
        try:
            flat = newest_state(hub_blobs(directory), snapshot.versions, founding.terms, layout)
        except FileNotFoundError:
            continue
        number = snapshot.versions[-1].number
        write_state(layout, flat, target, {"run": founding.name, "version": str(number)})
        return number
    raise HubError(
        f"a file that the log names is missing in {directory / 'blobs'}",
        hint="Take the model from a mirror of the hub, or from a machine that trains in the run.",
    )


def _read(directory: Path) -> HubSnapshot:
    log = HubLog(directory)
    try:
        return log.read()
    finally:
        log.close()


def newest_state(
    blobs: BlobStore, versions: Sequence[CommittedRound], terms: RoundConfig, layout: VectorLayout
) -> torch.Tensor:
    """Return the newest state, with the same bits as every member.

    Raise FileNotFoundError if a blob was removed meanwhile.
    """
    flat = torch.zeros(layout.numel)
    for step in steps_after(versions, None):
        form = VectorForm(layout.numel, terms.chunk, step.codec, step.version)
        add_vector(blobs.path(step.sha256), form, flat, is_base=step.kind == "base")
    return flat


def write_state(layout: VectorLayout, flat: torch.Tensor, target: Path, facts: dict[str, str]) -> None:
    """Write the state as ``model.safetensors`` in the folder ``target``."""
    pieces = torch.split(flat, [entry.numel for entry in layout.entries])
    tensors = {
        entry.name: piece.reshape(entry.shape).to(getattr(torch, entry.dtype))
        for entry, piece in zip(layout.entries, pieces, strict=True)
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_model(tensors, target / FILE_NAME, facts)
    except OSError as error:
        raise HubError(
            f"the model cannot be written to {target}: {error.strerror or error}",
            hint="Name a folder that can be written, on a disk with space for the model.",
        ) from error
