"""A training with much state and little to reduce: most of the model is frozen, as in fine-tuning.

STATE_MB: the size of the state. STEP_S: seconds of each step, which stand for a device's work.
"""

from __future__ import annotations

import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import barnraise

torch.set_num_threads(1)
torch.manual_seed(0)


def main() -> None:
    frozen = int(os.environ.get("STATE_MB", "500")) * 1_000_000 // 4
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    model.register_buffer("frozen", torch.zeros(frozen))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(8 * 4000, 16), torch.randn(8 * 4000, 1))
    run = barnraise.init(unit=1, checkpoint_s=36000)
    model, optimizer, batches = run.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    if run.healed is not None:
        print("HEALED", run.healed.bytes, f"{run.healed.seconds:.6f}", run.healed.donors, flush=True)
    share = float(os.environ.get("STEP_S", "1.0")) / 8
    for batch in batches:
        for x, y in batch:
            time.sleep(share * run.world)
            torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
