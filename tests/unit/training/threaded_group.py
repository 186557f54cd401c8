"""Several sessions in one process, each in its own thread, with a group that never breaks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from barnraise.compression import Codec, FeedbackPart
from barnraise.training.group.interface import Encoding
from barnraise.training.group.single import SingleWorkerGroup, SingleWorkerManager

Result = TypeVar("Result")


class SharedExchange:
    """Memory that the workers of the group share."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.barrier = threading.Barrier(world, timeout=60)
        self.values: list[object] = [None] * world
        self.lines = {
            (sender, to): queue.SimpleQueue[torch.Tensor]() for sender in range(world) for to in range(world)
        }

    def exchange(self, rank: int, value: object) -> list[object]:
        """Return the values of all workers, by rank."""
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class PendingCopy:
    """A tensor that is received when it is waited for."""

    def __init__(self, line: queue.SimpleQueue[torch.Tensor], tensor: torch.Tensor) -> None:
        self._line, self._tensor = line, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._line.get(timeout=60))


class LoneWorker(SingleWorkerManager, SingleWorkerGroup):
    """Manager and group of a single worker in one object, to be subclassed by faults."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = self


class ThreadWorker(LoneWorker):
    """Manager and group of one worker, over memory that all threads share."""

    def __init__(self, exchange: SharedExchange, rank: int) -> None:
        super().__init__()
        self.rank, self.world, self.generation = rank, exchange.world, 1  # type: ignore[misc]
        self._exchange = exchange

    def machines(self) -> tuple[str, ...]:
        return ("",) * self.world

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        return [
            received
            for received in self._exchange.exchange(self.rank, message)
            if isinstance(received, bytes)
        ]

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingCopy:
        parts = [part for part in self._exchange.exchange(self.rank, tensor.clone()) if torch.is_tensor(part)]
        line = queue.SimpleQueue[torch.Tensor]()
        line.put(torch.stack(parts).sum(0))
        return PendingCopy(line, tensor)

    def all_reduce_compressed(self, own: Encoding) -> tuple[torch.Tensor, Callable[[], None]]:  # type: ignore[override]
        """Add the payloads of all workers, in rank order."""
        tensor, codec, turn, _, feedback = own
        assert isinstance(codec, Codec)
        encoded = feedback.encode(codec, tensor, turn)
        total = torch.zeros(tensor.numel())
        for payload in self._exchange.exchange(self.rank, encoded.payload):
            assert isinstance(payload, torch.Tensor)
            codec.add(total, payload, turn)
        return total, lambda: feedback.keep(encoded.residual, [FeedbackPart(turn.name, tuple(tensor.shape))])

    def send_async(self, tensor: torch.Tensor, to: int) -> PendingCopy:
        self._exchange.lines[self.rank, to].put(tensor.clone())
        line = queue.SimpleQueue[torch.Tensor]()
        line.put(tensor)
        return PendingCopy(line, tensor)

    def receive_async(self, tensor: torch.Tensor, sender: int) -> PendingCopy:
        return PendingCopy(self._exchange.lines[sender, self.rank], tensor)


def run_workers(world: int, train: Callable[[ThreadWorker], Result]) -> list[Result]:
    """Run a training on each worker, and return the results by rank."""
    exchange = SharedExchange(world)

    def worker(rank: int) -> Result:
        try:
            return train(ThreadWorker(exchange, rank))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(worker, rank) for rank in range(world)]
    failed = [future.exception() for future in futures if future.exception() is not None]
    if failed:
        raise next(
            (error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0]
        )  # type: ignore[misc]
    return [future.result() for future in futures]
