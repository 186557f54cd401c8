"""Effect of rounds, codecs and the outer optimizer on the loss, in one process: the rules are set from this.

    python -m benchmarks.session.local_sgd --quick                          200 batches, a few minutes
    python -m benchmarks.session.local_sgd 8:int8:1.0:0.7 16:int4:1.0:0.8   400 batches each

A way is PERIOD:CODEC[:RATE:MOMENTUM[:AHEAD]]. AHEAD: number of steps of the next round that are done when the
mean of one arrives.

This is the mathematics of a session with four members, one after the other in one process. The codecs with
their error feedback are real. The samples and the model are those of `programs/characters.py`, with AdamW
inside and Nesterov SGD outside. `benchmarks.plans --only quality` does it with real sessions, which takes
several times as long. The last line is one JSON object of figures.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from barnraise.compression import Codec, CodecRound, ErrorFeedback, FeedbackPart, codec_named
from benchmarks.report import environment_line, last_line, table

sys.path.append(str(Path(__file__).parents[1] / "programs"))
import characters  # type: ignore[import-not-found]  # a program, beside the others

WORKERS, RATE = 4, 3e-3
QUICK = ("8:exact:0.7:0.3", "8:exact:1.0:0.5", "8:exact:1.0:0.7", "1:topk")
LONG = ("1:int8", "1:int4", "1:topk", "8:int8:1.0:0.5", "8:int8:1.0:0.7", "8:int4:1.0:0.7", "16:int4:1.0:0.7")


class Way(NamedTuple):
    period: int
    codec: str
    rate: float
    momentum: float
    ahead: int = 0

    @classmethod
    def read(cls, text: str) -> Way:
        period, codec, *outer = text.split(":")
        rate, momentum = (float(number) for number in outer[:2]) if outer else (1.0, 0.0)
        return cls(int(period), codec, rate, momentum, *map(int, outer[2:]))


class Sum:
    """Sum over the workers, encoded by a codec."""

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._feedback = [ErrorFeedback(0.95 if codec and codec.is_sparse else 1.0) for _ in range(WORKERS)]

    def __call__(self, vectors: Sequence[torch.Tensor], step: int) -> torch.Tensor:
        codec, total = self._codec, torch.zeros_like(vectors[0])
        if codec is None:
            return torch.stack(list(vectors)).sum(0)
        there, back = CodecRound("there", step), CodecRound("back", step)
        for vector, feedback in zip(vectors, self._feedback, strict=True):
            encoded = feedback.encode(codec, vector.clone(), there)
            codec.add(total, encoded.payload, there)
            feedback.keep(encoded.residual, [FeedbackPart(there.name, tuple(vector.shape))])
        if codec.is_sparse:
            return total
        again = torch.zeros_like(total)
        codec.add(again, codec.encode(total, back), back)
        return again


class Training:
    """Samples of all members in one order, as a session assigns them to equal members."""

    def __init__(self, way: Way, batches: int, seed: int) -> None:
        characters.SEED = seed
        torch.manual_seed(seed)
        self._way, self._batches = way, batches
        text = characters.text()
        cut = len(text) * 9 // 10
        self._data = characters.Pieces(text[:cut], characters.BATCH * batches)
        self._held_out = characters.Pieces(text[cut:], characters.BATCH * characters.HELD_OUT)
        stream = torch.Generator().manual_seed(seed + 99)
        self._order: list[int] = torch.randperm(len(self._data), generator=stream).tolist()
        model = characters.Characters()
        self._models = [copy.deepcopy(model) for _ in range(WORKERS if way.period > 1 else 1)]
        self._optimizers = [torch.optim.AdamW(replica.parameters(), lr=RATE) for replica in self._models]
        self._schedules = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=batches + 1, pct_start=0.1)
            for optimizer in self._optimizers
        ]
        named = None if way.codec == "exact" else codec_named(way.codec)
        assert named is None or isinstance(named, Codec)
        self._sum = Sum(named)

    def loss(self) -> float:
        """Train on all batches and return the loss on held-out data."""
        if self._way.period > 1:
            self._train_in_rounds()
        else:
            for number in range(self._batches):
                self._step_together(number)
        model, batch = self._models[0].eval(), characters.BATCH
        with torch.no_grad():
            losses = [
                float(characters.loss_of(model, *_stacked(self._held_out, range(first, first + batch))))
                for first in range(0, len(self._held_out), batch)
            ]
        return sum(losses) / len(losses)

    def _step_together(self, number: int) -> None:
        model, share = self._models[0], characters.BATCH // WORKERS
        gradients = []
        for worker in range(WORKERS):
            first = number * characters.BATCH + worker * share
            model.zero_grad()
            (self._loss(model, first, share) / WORKERS).backward()  # type: ignore[no-untyped-call]
            gradients.append(_flat([parameter.grad for parameter in model.parameters()]))
        total = self._sum(gradients, number)
        for parameter, piece in zip(model.parameters(), _pieces(model, total), strict=True):
            parameter.grad = piece.clone()
        self._inner_step(0)

    def _train_in_rounds(self) -> None:
        way, state = self._way, _flat(self._models[0].parameters())
        velocity = torch.zeros_like(state)
        under_way: list[torch.Tensor] = []  # what the members have changed in the round before
        for begin in range(0, self._batches, way.period):
            steps = min(way.period, self._batches - begin)
            handed_in = [_flat(model.parameters()) for model in self._models]
            self._train(begin, steps, 0, min(way.ahead, steps))
            if under_way:
                state, velocity = self._moved(state, velocity, self._sum(under_way, begin))
            for model, before in zip(self._models, handed_in, strict=True):
                _load(model, state + (_flat(model.parameters()) - before))
            self._train(begin, steps, min(way.ahead, steps), steps)
            under_way = [(_flat(model.parameters()) - state) / WORKERS for model in self._models]
        state, _ = self._moved(state, velocity, self._sum(under_way, self._batches))
        _load(self._models[0], state)

    def _train(self, begin: int, steps: int, first: int, last: int) -> None:
        """Run every member's local steps from ``first`` to ``last`` of the round that starts at ``begin``."""
        batch, share = characters.BATCH, characters.BATCH // WORKERS
        for worker, model in enumerate(self._models):
            for step in range(first, last):
                self._optimizers[worker].zero_grad()
                self._loss(model, begin * batch + (worker * steps + step) * share, share).backward()  # type: ignore[no-untyped-call]
                self._inner_step(worker)

    def _moved(
        self, state: torch.Tensor, velocity: torch.Tensor, change: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        momentum = self._way.momentum
        velocity = momentum * velocity + change
        step = change + momentum * velocity if momentum else change
        return state + self._way.rate * step, velocity

    def _loss(self, model: torch.nn.Module, first: int, count: int) -> torch.Tensor:
        loss: torch.Tensor = characters.loss_of(
            model, *_stacked(self._data, self._order[first : first + count])
        )
        return loss

    def _inner_step(self, worker: int) -> None:
        torch.nn.utils.clip_grad_norm_(self._models[worker].parameters(), 1.0)
        self._optimizers[worker].step()
        self._schedules[worker].step()


def _stacked(data: Any, places: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*(data[place] for place in places), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _pieces(model: torch.nn.Module, flat: torch.Tensor) -> list[torch.Tensor]:
    sizes = [parameter.numel() for parameter in model.parameters()]
    pieces = zip(torch.split(flat, sizes), model.parameters(), strict=True)
    return [piece.view_as(parameter) for piece, parameter in pieces]


def _load(model: torch.nn.Module, flat: torch.Tensor) -> None:
    with torch.no_grad():
        for parameter, piece in zip(model.parameters(), _pieces(model, flat), strict=True):
            parameter.copy_(piece)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("ways", nargs="*", metavar="PERIOD:CODEC[:RATE:MOMENTUM[:AHEAD]]")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(environment_line())
    batches = 200 if options.quick else options.batches
    exact = Training(Way(1, "exact", 1.0, 0.0), batches, options.seed).loss()
    rows: list[list[object]] = [["1:exact", exact, 0.0]]
    for text in options.ways or (QUICK if options.quick else LONG):
        loss = Training(Way.read(text), batches, options.seed).loss()
        rows.append([text, loss, loss / exact - 1])
        print("  ", *rows[-1], flush=True)
    print(table(["way", "loss", "over exact"], rows))
    last_line({str(name): float(str(over)) for name, _, over in rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
