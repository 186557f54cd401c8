"""Communication that overlaps with training: one call on a thread, on the CUDA stream of the script."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

from barnraise.core.flow.background import BackgroundCall

Result = TypeVar("Result")


class BackgroundTask(BackgroundCall[Result]):
    """One call on a thread that uses the CUDA stream that was current when it started.

    Nothing may change the call's tensors until the call has ended.
    """

    def __init__(self, work: Callable[[], Result], name: str = "barnraise-reduce") -> None:
        is_on = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream() if is_on else None

        def run() -> Result:
            # Kernels of the script's stream may still compute the tensors that the call reads.
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                return work()

        super().__init__(run, name)
