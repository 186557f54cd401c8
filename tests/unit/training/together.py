"""Several sessions in one process, each in a thread of its own, with a group that never breaks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from barnraise.compression import Codec, FeedbackPart
from barnraise.training.gradients.compressed_reducer import Encoding
from barnraise.training.group.single import SingleWorkerGroup

Result = TypeVar("Result")


class Table:
    """What the members of the group share."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=60)
        self.laid: list[object] = [None] * world
        self.lines = {
            (sender, to): queue.SimpleQueue[torch.Tensor]() for sender in range(world) for to in range(world)
        }

    def exchange(self, rank: int, thing: object) -> list[object]:
        self.laid[rank] = thing
        self.barrier.wait()
        found = list(self.laid)
        self.barrier.wait()
        return found


class Arriving:
    def __init__(self, line: queue.SimpleQueue[torch.Tensor], tensor: torch.Tensor) -> None:
        self._line, self._tensor = line, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._line.get(timeout=60))


class Seat(SingleWorkerGroup):
    """A member of it."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__()
        self.rank, self.world, self.generation = rank, table.world, 1  # type: ignore[misc]
        self._table = table

    def gather(self, word: bytes) -> list[bytes]:
        return [one for one in self._table.exchange(self.rank, word) if isinstance(one, bytes)]

    def begin_sum(self, tensor: torch.Tensor) -> Arriving:
        parts = [one for one in self._table.exchange(self.rank, tensor.clone()) if torch.is_tensor(one)]
        line = queue.SimpleQueue[torch.Tensor]()
        line.put(torch.stack(parts).sum(0))
        return Arriving(line, tensor)

    def sum_coded(self, mine: Encoding) -> tuple[torch.Tensor, Callable[[], None]]:  # type: ignore[override]
        """Everybody's payload is added, in rank order."""
        tensor, codec, turn, _, feedback = mine
        assert isinstance(codec, Codec)
        encoded = feedback.encode(codec, tensor, turn)
        total = torch.zeros(tensor.numel())
        for payload in self._table.exchange(self.rank, encoded.payload):
            assert isinstance(payload, torch.Tensor)
            codec.add(total, payload, turn)
        return total, lambda: feedback.keep(encoded.residual, [FeedbackPart(turn.name, tuple(tensor.shape))])

    def begin_send(self, tensor: torch.Tensor, to: int) -> Arriving:
        self._table.lines[self.rank, to].put(tensor.clone())
        line = queue.SimpleQueue[torch.Tensor]()
        line.put(tensor)
        return Arriving(line, tensor)

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> Arriving:
        return Arriving(self._table.lines[sender, self.rank], tensor)


def together(world: int, train: Callable[[Seat], Result]) -> list[Result]:
    """What each member's training gives."""
    table = Table(world)

    def member(rank: int) -> Result:
        try:
            return train(Seat(table, rank))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(member, rank) for rank in range(world)]
    failed = [future.exception() for future in futures if future.exception() is not None]
    if failed:
        raise next((one for one in failed if not isinstance(one, threading.BrokenBarrierError)), failed[0])  # type: ignore[misc]
    return [future.result() for future in futures]
