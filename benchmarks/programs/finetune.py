"""Fine-tuning of a Llama-shaped model with low-rank adapters, timed.

WAY: session | accelerate | plain, which is a loop of torch alone. More than 1 GB is frozen, and about 10 MB
are trained in float32. A host waits DELAY seconds for each sample, times its own SLOWNESS, which simulates
slower devices. Rank 0 prints its figures. A worker that joins later prints what it has received.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

LAYERS = int(os.environ.get("LAYERS", "8"))
WIDTH = int(os.environ.get("WIDTH", "1024"))
WORDS = int(os.environ.get("WORDS", "128256"))  # as in Llama 3
LENGTH = int(os.environ.get("LENGTH", "8"))
BATCH = int(os.environ.get("BATCH", "6"))
UNIT = int(os.environ.get("UNIT", "1"))
STEPS = int(os.environ.get("STEPS", "12"))
WARM = int(os.environ.get("WARM", "4"))
LOSSES = os.environ.get("LOSSES", "")  # a file: each micro-batch adds its first sample and its loss
DELAY = float(os.environ.get("DELAY", "0"))
HOLD = os.environ.get("HOLD", "")  # a file: while it exists, samples take longer
HELD_S = (1.0, 20.0)  # for each sample of the first and the second half of the steps: the run shall not end
SLOWNESS = float(os.environ.get("SLOWNESS", "1"))
RATE = float(os.environ.get("RATE", "1e-4"))
CHECKPOINT_S = float(os.environ.get("CHECKPOINT_S", "5"))
HEADS, RANK = 8, 16

torch.set_num_threads(1)
torch.manual_seed(0)


def random(rows: int, columns: int) -> torch.Tensor:
    """Return random weights, made in place: a copy would hide what a session adds to the memory."""
    bound = (3 / columns) ** 0.5
    return torch.empty(rows, columns).uniform_(-bound, bound)


class Adapted(torch.nn.Module):
    """Frozen linear layer with a trained low-rank adapter."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(random(out, width), requires_grad=False)
        self.down = torch.nn.Parameter(random(RANK, width))
        self.up = torch.nn.Parameter(torch.zeros(out, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) + functional.linear(functional.linear(x, self.down), self.up)


class Block(torch.nn.Module):
    """Layer of a Llama: attention with rotary positions, then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        hidden = WIDTH * 11 // 4  # as in Llama: 8/3, rounded up to a multiple of 256
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
        out: torch.Tensor = x + self.fall(functional.silu(self.gate(y)) * self.rise(y))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)


class Llama(torch.nn.Module):
    """Decoder-only language model whose base is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH, _weight=random(WORDS, WIDTH)).requires_grad_(False)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(WIDTH).requires_grad_(False)
        self.head = torch.nn.Parameter(random(WORDS, WIDTH), requires_grad=False)
        half = WIDTH // HEADS // 2
        angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles))
        self.turn: torch.Tensor

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, self.turn)
        return functional.linear(self.norm(x), self.head)


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:3], -1, 2).contiguous())
    return torch.view_as_real(pairs * turn).flatten(3)


def loss_of(model: torch.nn.Module, words: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the loss of some samples; ``numbers``: their places in the data."""
    time.sleep(DELAY * SLOWNESS * len(words))
    half = 2 * int(numbers[0]) // (BATCH * STEPS)
    held_until = time.monotonic() + HELD_S[half] * SLOWNESS * len(words)
    while HOLD and os.path.exists(HOLD) and time.monotonic() < held_until:
        time.sleep(0.1)
    logits = model(words[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    if LOSSES:
        with open(LOSSES, "a", encoding="ascii") as file:
            file.write(f"{int(numbers[0])} {loss.item()!r}\n")
    return loss


def make_data() -> TensorDataset:
    """Return sentences in which each word follows from the one before it, in four batches that repeat.

    So the model learns them by heart, and the loss falls.
    """
    stream = torch.Generator().manual_seed(1)
    first = torch.randint(0, WORDS, (4 * BATCH, 1), generator=stream)
    sentences = (first + 7 * torch.arange(LENGTH + 1)) % WORDS
    numbers = torch.arange(BATCH * STEPS)
    return TensorDataset(sentences[numbers % len(sentences)], numbers)


def make_model() -> tuple[Llama, torch.optim.Optimizer]:
    """Return the model, and an optimizer of all that is trained."""
    model = Llama()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=RATE)


class Training(NamedTuple):
    """A training of this worker: when each step ended, and what only one worker prints."""

    is_main: bool
    ends: list[float]
    more: dict[str, Any]


def train_with_session(data: TensorDataset) -> Training:
    import barnraise

    model, optimizer = make_model()
    run = barnraise.init(unit=UNIT, checkpoint_s=CHECKPOINT_S, copies=3)
    loader = DataLoader(data, batch_size=BATCH)
    at_load = [0]

    def note(*_: object) -> None:
        at_load.append(received_bytes())

    model.register_load_state_dict_pre_hook(note)  # type: ignore[no-untyped-call]
    before = received_bytes()
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    if run.healed is not None:  # the state was loaded once, after its last byte had come
        healed = {"bytes": run.healed.bytes, "wire": at_load[-1] - before, "donors": run.healed.donors}
        print("HEALED", json.dumps(healed), flush=True)
    ends = [time.monotonic()]
    run.on_commit(lambda _: ends.append(time.monotonic()))
    for batch in batches:
        for words, numbers in batch:
            loss = loss_of(model, words, numbers)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return Training(run.is_main, ends, sizes_of(model, optimizer))


def train_with_accelerate(data: TensorDataset) -> Training:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = make_model()
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ends = [time.monotonic()]
    for words, numbers in loader:
        loss = loss_of(model, words, numbers)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
    is_main = accelerator.is_main_process
    accelerator.end_training()
    return Training(is_main, ends, {})


def train_plainly(data: TensorDataset) -> Training:
    """Train alone, with the micro-batches of the session, so that activations are as large."""
    model, optimizer = make_model()
    ends = [time.monotonic()]
    for number, (words, numbers) in enumerate(DataLoader(data, batch_size=UNIT), 1):
        loss = loss_of(model, words, numbers) * (len(words) / BATCH)
        loss.backward()  # type: ignore[no-untyped-call]
        if number % (BATCH // UNIT) == 0:
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.monotonic())
    return Training(True, ends, sizes_of(model, optimizer))


def sizes_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that are trained, those of the optimizer's tensors, and those that are frozen."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = [value for memory in optimizer.state.values() for value in memory.values()]
    trained = bytes_of(parameters)
    return {
        "trained": trained,
        "moments": bytes_of(value for value in moments if isinstance(value, torch.Tensor)),
        "frozen": bytes_of(model.state_dict().values()) - trained,
    }


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def received_bytes() -> int:
    """Return what this host's network cards have received, with all headers."""
    rows = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(row[1]) for row in rows if row[0] != "lo:")


def main() -> None:
    ways = {"session": train_with_session, "accelerate": train_with_accelerate, "plain": train_plainly}
    training = ways[os.environ.get("WAY", "session")](make_data())
    steps = [late - early for early, late in itertools.pairwise(training.ends)][WARM:]
    if training.is_main:
        median = statistics.median(steps) if steps else 0.0
        print("FIGURES", json.dumps({"median": median, "steps": steps, **training.more}), flush=True)


if __name__ == "__main__":
    main()
