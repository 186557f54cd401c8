"""A small transformer continues text letter by letter."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import barnraise

TEXT = (
    "the mac on the desk and the old box in the hall train one model together. "
    "when the lid of a laptop closes the others go on, and when it opens it catches up. "
) * 20
LETTERS = sorted(set(TEXT))
LENGTH = 32


class Pieces(Dataset):
    """Pieces of the text, and the same pieces one letter further."""

    def __init__(self, count):
        self.codes = torch.tensor([LETTERS.index(letter) for letter in TEXT])
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = index * 7 % (len(self.codes) - LENGTH - 1)
        return self.codes[start : start + LENGTH], self.codes[start + 1 : start + LENGTH + 1]


class Writer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(LETTERS))

    def forward(self, codes):
        length = codes.shape[1]
        known = self.letters(codes) + self.places(torch.arange(length, device=codes.device))
        past_only = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        return self.out(self.layers(known, mask=past_only, is_causal=True))


def continued(model, text, letters):
    model.eval()
    codes = [LETTERS.index(letter) for letter in text]
    with torch.no_grad():
        for _ in range(letters):
            known = torch.tensor([codes[-LENGTH:]], device=model.out.weight.device)
            codes.append(int(model(known)[0, -1].argmax()))
    return "".join(LETTERS[code] for code in codes)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    small = options.parse_args().small
    run = barnraise.init(seed=2)
    torch.manual_seed(0)
    model = Writer().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16 if small else 400)
    loader = DataLoader(Pieces(256 if small else 3200), batch_size=32, shuffle=True)

    run.clip_grad_norm(1.0)
    model, optimizer, batches, schedule = run.prepare(model, optimizer, loader, schedule)
    for _ in run.epochs(2 if small else 4):
        for batch in batches:
            for known, following in batch:
                known, following = known.to(run.device), following.to(run.device)
                loss = nn.functional.cross_entropy(model(known).flatten(0, 1), following.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                run.log(loss=loss)
            if run.every(5 if small else 20):
                loss = run.history[-1]["loss"]
                run.print(f"step {run.step} of {run.total_steps}: loss {loss:.3f} on {run.world} machines")
    if run.is_main:
        print(continued(model, "the mac on the ", 20 if small else 60))
    run.save("writer.safetensors")


if __name__ == "__main__":
    main()
