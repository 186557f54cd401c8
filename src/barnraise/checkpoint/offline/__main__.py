"""``python -m barnraise.checkpoint.offline [OPTIONS] TARGET FOLDER...``: reshards a sharded checkpoint.

It is a separate process, because the command line does not import torch. It prints a JSON object.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import msgspec

from barnraise.checkpoint.offline.reshard import write_safetensors, write_shards
from barnraise.checkpoint.offline.source import ShardSource, find_checkpoint
from barnraise.core.errors import BarnraiseError, CheckpointError

FILE_NAME = "model.safetensors"


def reshard(
    roots: list[Path], target: Path, *, count: int, step: int | None, is_one_file: bool, prefix: str
) -> dict[str, object]:
    """Write the newest complete checkpoint of these folders in the form that is asked for.

    Return facts about what was written.
    """
    files = find_checkpoint(roots, step)
    try:
        source = ShardSource(files)
        if is_one_file:
            path, info = target / FILE_NAME, {"steps": str(files.manifest.step)}
            number = write_safetensors(source, path, prefix, info)
        else:
            path, number = write_shards(source, target, count), len(source.tensors)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}",
            hint="Name a folder that can be written, on a disk with space for the whole state.",
        ) from error
    return {"step": files.manifest.step, "path": str(path), "tensors": number}


def main(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m barnraise.checkpoint.offline", description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--into", type=int, default=1)
    parser.add_argument("--step", type=int)
    parser.add_argument("--safetensors", action="store_true")
    parser.add_argument("--prefix", default="")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="barnraise: %(message)s")
    try:
        facts = reshard(
            given.folders,
            given.target,
            count=given.into,
            step=given.step,
            is_one_file=given.safetensors,
            prefix=given.prefix,
        )
    except (BarnraiseError, OSError) as error:
        text = f"{error.message}. {error.hint}" if isinstance(error, BarnraiseError) else str(error)
        sys.stderr.write(f"{text}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(facts).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
