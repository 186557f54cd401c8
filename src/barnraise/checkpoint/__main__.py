"""``python -m barnraise.checkpoint STATE RUN TARGET``: the newest whole checkpoint's model, as safetensors.

A process of its own, because the command line does not import torch. ``STATE`` is the agent's directory; the
checkpoint is there by now. Prints what was found as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from barnraise.checkpoint.files import Checkpoints, write_model
from barnraise.checkpoint.serialization import assemble
from barnraise.checkpoint.signer import AgentCheckpointSigner, CheckpointSigner
from barnraise.core.errors import BarnraiseError, RunError


def export(folder: Path, run: str, target: Path, notary: CheckpointSigner) -> dict[str, object]:
    """Write ``model.safetensors``, whole or not at all; returns where it comes from."""
    found = Checkpoints(folder, run, notary).newest()
    if found is None:
        raise RunError(f"no whole checkpoint of run {run} is in {folder}", hint="Try its other machines.")
    manifest, parts = found
    model = assemble(parts.skeleton, parts.tensors)["model"]
    target.mkdir(parents=True, exist_ok=True)
    write_model(model, target / "model.safetensors", {"run": run, "steps": str(manifest.step)})
    return {
        "steps": manifest.step,
        "generation": manifest.generation,
        "provisional": manifest.provisional,
        "digest": manifest.digest,
        "previous": manifest.previous,
    }


def main() -> int:
    state, run, target = sys.argv[1:]
    try:
        folder = Path(state) / "runs" / run / "checkpoints"
        facts = export(folder, run, Path(target), AgentCheckpointSigner(Path(state), run))
    except (BarnraiseError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(facts).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
