"""Tunes a language model to questions and answers with TRL's SFTTrainer, on all machines.

One import differs from a script for one machine.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from barnraise.integrations.transformers import SFTTrainer  # alone: from trl import SFTTrainer

TEXT = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
NUMBERS = TEXT.split()


def questions(count):
    """Return additions in words, with their results."""
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, 8, (count, 2), generator=draw).tolist()
    return [
        {"prompt": f"what is {NUMBERS[a]} and {NUMBERS[b]} ?", "completion": f" it is {NUMBERS[a + b]}"}
        for a, b in pairs
    ]


def tokenizer_of(rows):
    """Train a tokenizer of whole words on the rows."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<pad>", "<eos>", "<unk>"])
    words.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    small = options.parse_args().small
    rows = questions(64 if small else 2048)
    tokenizer = tokenizer_of(rows)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="sft",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,  # 16 samples in a step, on all machines together
            num_train_epochs=4 if small else 3,
            learning_rate=1e-2,
            logging_steps=4 if small else 16,
            save_strategy="no",
            report_to=[],
            bf16=False,
            max_length=32,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8,
            target_modules="all-linear",
            modules_to_save=["lm_head", "embed_tokens"],
            task_type="CAUSAL_LM",
        ),
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{result.global_step} steps, mean loss {result.training_loss:.5f}")
    trainer.save_model("sft-adapter")


if __name__ == "__main__":
    main()
