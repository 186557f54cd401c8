"""``python -m barnraise.checkpoint STATE RUN TARGET [FORM [BASE]]``: exports the newest checkpoint's model.

It is a separate process, because the command line does not import torch. ``STATE`` is the agent's directory,
where the checkpoint is already. ``FORM``: ``model``, ``adapter`` (of PEFT), or ``merged`` with the base model
in the folder ``BASE``. It prints a JSON object.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from barnraise.checkpoint.adapter_files import read_description, write_adapter, write_merged
from barnraise.checkpoint.files import Checkpoints, write_model
from barnraise.checkpoint.parts import TrainedTensors, merge_by_layers, shared_state, write_tensors
from barnraise.checkpoint.serialization import unflatten
from barnraise.checkpoint.signer import AgentCheckpointSigner, CheckpointSigner
from barnraise.core.errors import BarnraiseError, CheckpointError, RunError
from barnraise.runs.checkpoint_manifest import CheckpointManifest

log = logging.getLogger("barnraise.checkpoint")


class _SavedModel(NamedTuple):
    """A checkpoint on this disk. ``state``: what belongs to no parameter; ``model``: tensors by name."""

    manifest: CheckpointManifest
    state: Mapping[str, Any]
    model: Mapping[str, torch.Tensor]


def export(
    folder: Path,
    run: str,
    target: Path,
    signer: CheckpointSigner,
    form: str = "model",
    base: Path | None = None,
) -> dict[str, object]:
    """Write ``model.safetensors``, or the form that is asked for, to the target folder.

    Return facts about the checkpoint.
    """
    newest = _newest(Checkpoints(folder, run, signer))
    if newest is None:
        raise CheckpointError(
            f"no complete checkpoint of run {run} in {folder}", hint="Try the other machines of the run."
        )
    manifest, state, model = newest
    hashes = (state.get("base") or {}).get("hashes", {})
    left_out = (
        {} if hashes == {} else {"base_tensors": None if hashes is None else len(hashes), "base": hashes}
    )
    info = {"run": run, "steps": str(manifest.step)}
    target.mkdir(parents=True, exist_ok=True)
    match form:
        case "adapter":
            write_adapter(target, read_description(state), model, info)
        case "merged":
            description = read_description(state)
            is_in_parts = isinstance(model, TrainedTensors)
            if not (is_in_parts and merge_by_layers(target, description, model, base, info)):
                write_merged(target, description, model, base, info, hashes or {})
        case _ if isinstance(model, TrainedTensors):
            write_tensors(target / "model.safetensors", model.forms, model.__getitem__, info)
        case _:
            write_model(model, target / "model.safetensors", info)
    return {
        "steps": manifest.step,
        "generation": manifest.generation,
        "provisional": manifest.provisional,
        "digest": manifest.digest,
        "previous": manifest.previous,
        **left_out,
    }


def _newest(checkpoints: Checkpoints) -> _SavedModel | None:
    """Open the newest checkpoint of which all is here and valid. Log why others are skipped."""
    for manifest, folder in checkpoints.manifests():
        try:
            if manifest.parts:
                return _SavedModel(manifest, shared_state(manifest), TrainedTensors(folder, manifest))
            _, parts = checkpoints.read(folder)
            state = unflatten(parts.skeleton, parts.tensors)
            named = {name: value for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
            return _SavedModel(manifest, state, named)
        except RunError as error:
            log.warning("%s is skipped: %s", folder.name, error.message)
    return None


def main() -> int:
    """Run the command and return the exit code."""
    state, run, target, *more = sys.argv[1:]
    form, base = (*more, "", "")[:2]
    try:
        folder = Path(state) / "runs" / run / "checkpoints"
        signer = AgentCheckpointSigner(Path(state), run)
        description = export(folder, run, Path(target), signer, form, Path(base) if base else None)
    except (BarnraiseError, OSError) as error:
        text = f"{error.message}. {error.hint}" if isinstance(error, BarnraiseError) else str(error)
        sys.stderr.write(f"{text}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(description).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
