"""An ordinary Hugging Face Accelerate training script. It knows nothing of any backend.

Prints on the main process each step's loss, and one JSON line: final weights, the evaluation over all
processes, the group used.
"""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def dataset(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1, keepdim=True) > 0).double())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--state", required=True)
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    training = DataLoader(dataset(64, 1), batch_size=options.batch_size)
    evaluation = DataLoader(dataset(27, 2), batch_size=options.batch_size)
    model, optimizer, training, evaluation, scheduler = accelerator.prepare(
        model, optimizer, training, evaluation, scheduler
    )
    for epoch in range(2):
        model.train()
        for inputs, targets in training:
            with accelerator.accumulate(model):
                loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.print("loss", accelerator.reduce(loss.detach(), "mean").item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(options.state)
            accelerator.wait_for_everyone()
            accelerator.load_state(options.state)
    model.eval()
    predictions = []
    for inputs, _ in evaluation:
        with torch.no_grad():
            predictions.append(accelerator.gather_for_metrics(model(inputs)))
    note = ["from the main process" if accelerator.is_main_process else None]
    broadcast_object_list(note)
    summed = accelerator.reduce(torch.tensor(float(accelerator.process_index + 1)), "sum")
    accelerator.wait_for_everyone()
    weights = torch.cat([p.detach().reshape(-1) for p in accelerator.unwrap_model(model).parameters()])
    if accelerator.is_main_process:
        group = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
        report = {
            "processes": accelerator.num_processes,
            "group": group,
            "weights": weights.tolist(),
            "predictions": torch.cat(predictions).reshape(-1).tolist(),
            "note": note[0],
            "summed": summed.item(),
        }
        accelerator.print(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main()
