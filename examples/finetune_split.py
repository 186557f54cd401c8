"""Fine-tunes a language model with LoRA that no machine holds as a whole: each has a run of its blocks.

The base is the folder of a Transformers model, sent by `barnraise run --model base=FOLDER` (docs/split.md).
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import barnraise

WIDTH = 128  # tokens of one sample


def read(place):
    """Return the samples of the text files in a folder. Their bytes are the tokens."""
    text = b"".join(file.read_bytes() for file in sorted(place.glob("*.md")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // WIDTH * WIDTH].reshape(-1, WIDTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--text", type=Path, default=Path(__file__).parent, help="a folder of text files")
    options.add_argument("--epochs", type=int, default=1)
    given = options.parse_args()
    run = barnraise.init(seed=0)
    base = barnraise.model_path("base")
    with run.empty():  # its parameters have no memory yet
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    run.clip_grad_norm(1.0)
    model, batches = run.split(
        model,
        DataLoader(read(given.text), batch_size=16, shuffle=True),
        weights=base,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    for _ in run.epochs(given.epochs):
        for batch in batches:
            loss = model.train_step(batch)  # forward, backward and optimizer, on all machines together
            run.log(loss=loss)
            if run.every(5):
                run.print(f"step {run.step}: loss {loss:.4f}")
    run.save("adapter")  # a folder for PeftModel.from_pretrained


if __name__ == "__main__":
    main()
