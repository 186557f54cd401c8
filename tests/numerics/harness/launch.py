"""Runs an unmodified script on a given backend: creates the process group, then runs the script.

Accelerate selects a backend from its own table, which knows only torch's. On CPU it insists on Gloo, even
against ``InitProcessGroupKwargs(backend=...)``. But it uses a process group that already exists. So the
group is created before the script starts, from the usual environment (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT).
"""

from __future__ import annotations

import runpy
import sys

import torch.distributed as dist


def main() -> None:
    backend, script, *arguments = sys.argv[1:]
    if backend == "barnraise":
        from barnraise.collectives.torch_patch.autoload import register

        register()
    dist.init_process_group(backend)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
