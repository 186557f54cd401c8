"""Arena of shared memory: blocks as torch views, and staging of device tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from barnraise.collectives.command_channel import CommandChannel
from barnraise.collectives.shm.allocator import Block, BlockAllocator
from barnraise.collectives.shm.segment import SharedSegment
from barnraise.core.errors import UnsupportedOperation

log = logging.getLogger("barnraise.collectives")

_SEGMENT_BYTES = 64 << 20
_ROUND_BYTES = 2 << 20

CopyContext = Callable[[], AbstractContextManager[object]]


class SharedArena:
    """All shared segments of one worker. Thread-safe."""

    def __init__(self, comm_process: CommandChannel) -> None:
        self.comm_process = comm_process
        self._limit = comm_process.settings.collectives.arena_bytes
        self._lock = threading.Lock()
        self._blocks = BlockAllocator()
        self._segments: dict[int, tuple[SharedSegment, torch.Tensor]] = {}
        self._next = 0
        self._bytes = 0
        self._allocated = 0
        self._pinned: set[int] = set()
        self._announced: set[str] = set()

    def allocate(self, size: int) -> Block:
        with self._lock:
            block = self._blocks.allocate(size)
            if block is None:
                self._add_segment(size)
                block = self._blocks.allocate(size)
            assert block is not None
            self._allocated += block.size
            return block

    def has_room(self, size: int) -> bool:
        """Return True if ``size`` more bytes stay within the limit. Only callers that can wait ask for it."""
        return self._allocated + size <= self._limit

    def free(self, block: Block) -> None:
        with self._lock:
            self._allocated -= block.size
            self._blocks.free(block)
            if self._bytes > self._limit:
                for segment in self._blocks.idle_segments():
                    self._remove_segment(segment)

    def view(self, block: Block, size: int) -> torch.Tensor:
        """Return the block's first ``size`` bytes as a uint8 tensor."""
        return self._segments[block.segment][1][block.offset : block.offset + size]

    def check_device(self, device: torch.device) -> None:
        """Warn once that tensors of a device are staged through host memory.

        Raise UnsupportedOperation if the settings forbid staging.
        """
        kind = device.type
        if kind == "cpu" or kind in self._announced:
            return
        if kind == "meta":
            raise UnsupportedOperation(
                "a tensor on the meta device has no values to move", hint="Materialise it on a device first."
            )
        if self.comm_process.settings.collectives.staging == "refuse":
            raise UnsupportedOperation(
                f"a {kind} tensor would be staged through host memory, which collectives.staging forbids",
                hint='Move it to the CPU yourself, or set collectives.staging = "host".',
            )
        with self._lock:
            if kind in self._announced:
                return
            self._announced.add(kind)
            if kind == "cuda":
                for segment in self._segments:
                    self._pin(segment)
        log.warning("%s tensors are staged through host memory on their way to other machines", kind)

    def _add_segment(self, size: int) -> None:
        length = max(_SEGMENT_BYTES, -(-size // _ROUND_BYTES) * _ROUND_BYTES)
        shared = SharedSegment.create(length)
        number, self._next = self._next, self._next + 1
        with torch.inference_mode(False):  # every later caller must be able to write to it
            self._segments[number] = (shared, torch.frombuffer(shared.mapping, dtype=torch.uint8))
        self._blocks.add_segment(number, length)
        self._bytes += length
        self.comm_process.map_segment(number, shared)
        if "cuda" in self._announced:
            self._pin(number)

    def _pin(self, segment: int) -> None:
        """Lock a segment in memory so that CUDA copies run at full speed. Correctness never depends on it."""
        if segment not in self._pinned:
            tensor = self._segments[segment][1]
            code = _cuda_runtime().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
            if int(code) == 0:
                self._pinned.add(segment)
            else:
                log.info(
                    "shared memory could not be page-locked (CUDA error %d): copies are slower", int(code)
                )

    def _remove_segment(self, segment: int) -> None:
        shared, tensor = self._segments.pop(segment)
        if segment in self._pinned:
            self._pinned.discard(segment)
            _cuda_runtime().cudaHostUnregister(tensor.data_ptr())
        self._blocks.remove_segment(segment)
        self._bytes -= shared.size
        self.comm_process.unmap_segment(segment)
        # torch.frombuffer keeps the mapping alive but does not prevent close(): the last view unmaps it
        shared.close_descriptor()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch left it untyped


_copy_streams: dict[torch.device, torch.cuda.Stream] = {}
_plain: CopyContext = nullcontext


def copy_context(device: torch.device, tensors: Sequence[torch.Tensor]) -> CopyContext:
    """Return the context for the copies of an operation, on any thread. The submitting thread calls it.

    On CUDA the copies run on a stream of our own, after all work that the caller has queued. Later chunks
    are copied by another thread, whose current stream does not know about that work. A copy to or from the
    host completes before it returns, so the caller needs no event of ours. Inference tensors can be written
    only in inference mode.
    """
    inference = torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in tensors)
    if device.type == "cuda":
        return _after_caller_stream(device, inference)
    return (lambda: torch.inference_mode()) if inference else _plain


def _after_caller_stream(device: torch.device, inference: bool) -> CopyContext:
    submitted = torch.cuda.current_stream(device).record_event()
    stream = _copy_streams.get(device)
    if stream is None:
        stream = _copy_streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # likewise

    @contextmanager
    def context() -> Iterator[None]:
        with torch.inference_mode(inference), torch.cuda.stream(stream):
            stream.wait_event(submitted)
            yield

    return context
