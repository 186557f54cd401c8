"""Files of an evaluation without a network: tasks of lm-evaluation-harness, and a small model."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def write_tasks(folder: Path, rows: int) -> Path:
    """Write two tasks of local files into ``tasks``: questions with choices, and texts to continue."""
    tasks = folder / "tasks"
    tasks.mkdir()
    lines = [
        {
            "question": " ".join(f"w{(row * 7 + place) % 40}" for place in range(3 + row % 5)),
            "answer": row % 3,
        }
        for row in range(rows)
    ]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = "dataset_path: json\ndataset_kwargs: {data_files: {test: tasks/rows.jsonl}}\n"
    common = data + "test_split: test\ndoc_to_text: '{{question}}'\n"
    metric = "metric_list: [{metric: %s, aggregation: mean, higher_is_better: true}]\n"
    choose = "task: choose\noutput_type: multiple_choice\ndoc_to_choice: ['w1', 'w2 w3', 'w4']\n"
    (tasks / "choose.yaml").write_text(common + choose + "doc_to_target: answer\n" + metric % "acc")
    write = "task: write\noutput_type: generate_until\ndoc_to_target: 'w{{answer}}'\n"
    write += "generation_kwargs: {until: ['w9'], max_gen_toks: 4, do_sample: false}\n"
    (tasks / "write.yaml").write_text(common + write + metric % "exact_match")
    return tasks


def write_model(folder: Path) -> Path:
    """Write a small language model with random parameters, and a tokenizer of 50 words."""
    import tokenizers
    import transformers

    words = {f"w{number}": number for number in range(48)} | {"<end>": 48, "<unknown>": 49}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=48, eos_token_id=48
    )
    model = folder / "model, with a comma"
    transformers.GPT2LMHeadModel(config).save_pretrained(model)
    fast.save_pretrained(model)
    return model
