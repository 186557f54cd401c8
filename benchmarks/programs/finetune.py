"""Fine-tuning of a Llama-shaped model with low-rank adapters: in a session, or with Accelerate.

WAY: session | accelerate. More than 1 GB is frozen, and about 10 MB are trained. A host waits DELAY seconds
for each sample, times its own SLOWNESS, which simulates slower devices. Rank 0 prints its figures.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

LAYERS = int(os.environ.get("LAYERS", "16"))
WIDTH = int(os.environ.get("WIDTH", "1024"))
WORDS = int(os.environ.get("WORDS", "32000"))
LENGTH = int(os.environ.get("LENGTH", "8"))
BATCH = int(os.environ.get("BATCH", "24"))
UNIT = int(os.environ.get("UNIT", "2"))
STEPS = int(os.environ.get("STEPS", "14"))
WARM = int(os.environ.get("WARM", "4"))
DELAY = float(os.environ.get("DELAY", "0.25"))
SLOWNESS = float(os.environ.get("SLOWNESS", "1"))
CHECKPOINT_S = float(os.environ.get("CHECKPOINT_S", "5"))
HEADS, RANK = 8, 8

torch.set_num_threads(1)
torch.manual_seed(0)


class Adapted(torch.nn.Module):
    """Frozen linear layer with a trained low-rank adapter."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(out, width) * width**-0.5, requires_grad=False)
        self.down = torch.nn.Parameter(torch.randn(RANK, width) * width**-0.5)
        self.up = torch.nn.Parameter(torch.zeros(out, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) + functional.linear(functional.linear(x, self.down), self.up)


class Block(torch.nn.Module):
    """Layer of a Llama: attention with rotary positions, then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        hidden = WIDTH * 8 // 3
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(WIDTH) for _ in range(2)).requires_grad_(False)
        self.q, self.k, self.v, self.o = (Adapted(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.rise = Adapted(WIDTH, hidden), Adapted(WIDTH, hidden)
        self.fall = Adapted(hidden, WIDTH)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (self._heads(layer(y)) for layer in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(_turned(q, turn), _turned(k, turn), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.fall(functional.silu(self.gate(y)) * self.rise(y))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)


class Llama(torch.nn.Module):
    """Decoder-only language model whose base is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(WIDTH).requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)
        half = WIDTH // HEADS // 2
        angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles))
        self.turn: torch.Tensor

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, self.turn)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(3, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(3)


def loss_of(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    time.sleep(DELAY * SLOWNESS * len(words))
    logits = model(words[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_data() -> TensorDataset:
    """Return sentences in which each word follows from the one before it."""
    stream = torch.Generator().manual_seed(1)
    first = torch.randint(0, WORDS, (BATCH * 200, 1), generator=stream)[: BATCH * STEPS]
    return TensorDataset((first + 7 * torch.arange(LENGTH + 1)) % WORDS)


def train_with_session(data: TensorDataset) -> tuple[bool, list[float], dict[str, Any]]:
    import barnraise

    model = Llama()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-4)
    run = barnraise.init(unit=UNIT, checkpoint_s=CHECKPOINT_S, copies=3)
    loader = DataLoader(data, batch_size=BATCH)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    if run.healed is not None:
        print("HEALED", run.healed.bytes, f"{run.healed.seconds:.6f}", run.healed.donors, flush=True)
    times = [time.monotonic()]
    run.on_commit(lambda _: times.append(time.monotonic()))
    for batch in batches:
        for (words,) in batch:
            loss = loss_of(model, words)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
    losses = [row["loss"] for row in run.history]
    sizes = sum(parameter.numel() * parameter.element_size() for parameter in trained(model))
    frozen = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()) - sizes
    return run.is_main, times, {"losses": losses, "trained": sizes, "frozen": frozen}


def train_with_accelerate(data: TensorDataset) -> tuple[bool, list[float], dict[str, Any]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Llama()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-4)
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    times = [time.monotonic()]
    for (words,) in loader:
        loss = loss_of(model, words)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.monotonic())
    is_main = accelerator.is_main_process
    accelerator.end_training()
    return is_main, times, {}


def main() -> None:
    way = train_with_session if os.environ.get("WAY", "session") == "session" else train_with_accelerate
    speaks, times, more = way(make_data())
    steps = [late - early for early, late in itertools.pairwise(times)][WARM:]
    if speaks:
        median = statistics.median(steps) if steps else 0.0
        print("FIGURES", json.dumps({"median": median, "steps": steps, **more}), flush=True)


if __name__ == "__main__":
    main()
