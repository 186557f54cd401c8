"""A map whose items wait as a device would compute, and draw random numbers; run by `benchmarks.evaluate`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import barnraise


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = barnraise.init()
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)).eval()
    count, trace = int(os.environ["COUNT"]), Path(os.environ["TRACE"])
    wait_s = float(os.environ["ITEM_S"]) * float(os.environ.get("SLOWNESS", "1"))

    def compute(item: int) -> torch.Tensor:
        time.sleep(wait_s)
        with torch.no_grad():
            result: torch.Tensor = net(torch.randn(16, 64)) + item
        with open(trace, "a", encoding="ascii") as file:
            file.write(f"{os.getpid()} {item}\n")
        return result

    run.map(str, range(8))  # the workers meet
    begin = time.perf_counter()
    results = run.map(compute, range(count))
    took = time.perf_counter() - begin
    save_file({"results": torch.stack(results)}, f"{os.environ['OUT']}-{os.environ.get('HOST', 'alone')}")
    run.print("FIGURES " + json.dumps({"seconds": took, "world": run.world}))


if __name__ == "__main__":
    main()
