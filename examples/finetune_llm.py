"""Fine-tunes a language model with LoRA on real text, in a loop of its own: peft and transformers.

The model is made from a config, and so knows nothing yet; put your own in `from_pretrained(...)`.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import barnraise

WIDTH = 128  # bytes of one sample


def samples(text):
    """Cut a text into rows of bytes, which are its tokens."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return TensorDataset(tokens[: len(tokens) // WIDTH * WIDTH].reshape(-1, WIDTH))


def base_model(size):
    """Return the model to be tuned: LlamaForCausalLM.from_pretrained("llama", local_files_only=True)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WIDTH,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    options.add_argument("--text", type=Path, default=Path(__file__).parent, help="a file or a folder")
    given = options.parse_args()
    files = sorted(given.text.glob("**/*.py")) if given.text.is_dir() else [given.text]
    data = samples(b"".join(file.read_bytes() for file in files))
    if given.small:
        data = TensorDataset(data.tensors[0][:64])

    model = base_model(64 if given.small else 256)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)

    run = barnraise.init(seed=0)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    run.clip_grad_norm(1.0)
    for epoch in run.epochs(3):
        for batch in batches:
            for (tokens,) in batch:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        if run.history:
            run.print(f"epoch {epoch}  loss {run.history[-1]['loss']:.3f}  machines {run.world}")
    run.save("adapter")  # a folder for PeftModel.from_pretrained


if __name__ == "__main__":
    main()
