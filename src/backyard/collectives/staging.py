"""Tensor memory that the mover sees: blocks of shared segments as torch views, and copies to and from devices."""

from __future__ import annotations

import logging
import threading

import torch

from backyard.collectives.blocks import Block, Blocks
from backyard.collectives.client import MoverClient
from backyard.collectives.segments import SharedSegment
from backyard.core.errors import UnsupportedOperation

log = logging.getLogger("backyard.collectives")

_SEGMENT_BYTES = 64 << 20
_ROUND_BYTES = 2 << 20


class Arena:
    """All shared segments of one worker. Thread-safe."""

    def __init__(self, mover: MoverClient) -> None:
        self.mover = mover
        self._lock = threading.Lock()
        self._blocks = Blocks()
        self._segments: dict[int, tuple[SharedSegment, torch.Tensor]] = {}
        self._next = 0
        self._bytes = 0
        self._pinned: set[int] = set()
        self._announced: set[str] = set()

    def take(self, size: int) -> Block:
        with self._lock:
            block = self._blocks.take(size)
            if block is None:
                self._grow(size)
                block = self._blocks.take(size)
            assert block is not None
            return block

    def give_back(self, block: Block) -> None:
        with self._lock:
            self._blocks.give_back(block)
            if self._bytes > self.mover.settings.collectives.arena_bytes:
                for segment in self._blocks.idle_segments():
                    self._drop(segment)

    def view(self, block: Block, size: int) -> torch.Tensor:
        """The block's first ``size`` bytes as uint8."""
        return self._segments[block.segment][1][block.offset : block.offset + size]

    def check_device(self, tensor: torch.Tensor) -> None:
        """Device tensors pass through host memory: say so once, or refuse where that was asked for."""
        device = tensor.device.type
        if device == "cpu" or device in self._announced:
            return
        if self.mover.settings.collectives.staging == "refuse":
            raise UnsupportedOperation(
                f"a {device} tensor would be staged through host memory, which collectives.staging forbids",
                hint='Move it to the CPU yourself, or set collectives.staging = "host".',
            )
        self._announced.add(device)
        log.warning("%s tensors are staged through host memory on their way to other machines", device)
        if device == "cuda":
            with self._lock:
                for segment in self._segments:
                    self._pin(segment)

    def _grow(self, size: int) -> None:
        length = max(_SEGMENT_BYTES, -(-size // _ROUND_BYTES) * _ROUND_BYTES)
        shared = SharedSegment.create(length)
        number, self._next = self._next, self._next + 1
        self._segments[number] = (shared, torch.frombuffer(shared.mapping, dtype=torch.uint8))
        self._blocks.add_segment(number, length)
        self._bytes += length
        self.mover.map(number, shared)
        if "cuda" in self._announced:
            self._pin(number)

    def _pin(self, segment: int) -> None:
        """Page-lock a segment so that CUDA copies run at full speed; never needed for correctness."""
        if segment not in self._pinned:
            tensor = self._segments[segment][1]
            code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
            if int(code) == 0:
                self._pinned.add(segment)

    def _drop(self, segment: int) -> None:
        shared, tensor = self._segments.pop(segment)
        if segment in self._pinned:
            self._pinned.discard(segment)
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._blocks.remove_segment(segment)
        self._bytes -= shared.size
        self.mover.unmap(segment)
        del tensor
        shared.close()
