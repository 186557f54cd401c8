"""``python -m barnraise.checkpoint STATE RUN TARGET``: exports the newest checkpoint's model as safetensors.

It is a separate process, because the command line does not import torch. ``STATE`` is the agent's directory,
where the checkpoint is already. It prints a JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from barnraise.checkpoint.files import Checkpoints, write_model
from barnraise.checkpoint.serialization import unflatten
from barnraise.checkpoint.signer import AgentCheckpointSigner, CheckpointSigner
from barnraise.core.errors import BarnraiseError, RunError


def export(folder: Path, run: str, target: Path, signer: CheckpointSigner) -> dict[str, object]:
    """Write ``model.safetensors`` to the target folder, atomically. Return facts about the checkpoint."""
    newest = Checkpoints(folder, run, signer).newest()
    if newest is None:
        raise RunError(
            f"no complete checkpoint of run {run} in {folder}", hint="Try the other machines of the run."
        )
    manifest, parts = newest
    state = unflatten(parts.skeleton, parts.tensors)
    model = {name: value for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
    base = (state.get("base") or {}).get("hashes", {})
    target.mkdir(parents=True, exist_ok=True)
    write_model(model, target / "model.safetensors", {"run": run, "steps": str(manifest.step)})
    left_out = {} if base == {} else {"base_tensors": None if base is None else len(base), "base": base}
    return {
        "steps": manifest.step,
        "generation": manifest.generation,
        "provisional": manifest.provisional,
        "digest": manifest.digest,
        "previous": manifest.previous,
        **left_out,
    }


def main() -> int:
    """Run the command and return the exit code."""
    state, run, target = sys.argv[1:]
    try:
        folder = Path(state) / "runs" / run / "checkpoints"
        description = export(folder, run, Path(target), AgentCheckpointSigner(Path(state), run))
    except (BarnraiseError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(description).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
