"""Runs a script unmodified on a given backend: first makes the process group, then becomes the script.

Accelerate asks its own table for a backend and knows only torch's (on CPU it insists on Gloo, even against
``InitProcessGroupKwargs(backend=...)``), but it takes a process group that already exists. So the group is
made before the script starts, from the usual environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
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
