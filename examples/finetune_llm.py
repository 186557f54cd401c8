"""Fine-tunes a language model with LoRA on real text: peft and Transformers' Trainer.

One import differs from a script for one machine. The model is made from a config, and so knows nothing yet.
To tune a model that was trained before, use `from_pretrained` with `--model` (docs/finetune.md).
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from barnraise.integrations.transformers import Trainer  # alone: from transformers import Trainer

WIDTH = 128  # bytes of one sample


class Rows(Dataset):
    """Pieces of a text. Its bytes are the tokens."""

    def __init__(self, text):
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.rows = tokens[: len(tokens) // WIDTH * WIDTH].reshape(-1, WIDTH)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def read(place):
    """Return the text of a file, or of the documents and scripts in a folder."""
    files = sorted([*place.glob("*.md"), *place.glob("*.py")]) if place.is_dir() else [place]
    return b"".join(file.read_bytes() for file in files)


def base_model(size):
    """Return the model to be tuned."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WIDTH,
    )
    return LlamaForCausalLM(config)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    options.add_argument("--text", type=Path, default=Path(__file__).parent, help="a file or a folder")
    given = options.parse_args()
    text = read(given.text)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    trainer = Trainer(
        model=get_peft_model(base_model(64 if given.small else 256), lora),
        args=TrainingArguments(
            "finetuned",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,  # 16 samples in a step, on all machines together
            num_train_epochs=3,
            learning_rate=5e-3,
            max_grad_norm=1.0,
            logging_steps=4,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Rows(text[: 96 * WIDTH] if given.small else text),
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps, mean loss {result.training_loss:.5f}")
    trainer.save_model("adapter")  # a folder for PeftModel.from_pretrained


if __name__ == "__main__":
    main()
