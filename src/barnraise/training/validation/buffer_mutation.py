"""Detection of buffers that a forward pass mutates: they would differ between workers."""

from __future__ import annotations

import torch

from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.core.errors import RunError
from barnraise.training.state.model_tensors import tensors_of

# A larger buffer (weights in 4 bit) is not copied: torch counts what forward writes into it.
_COPIED_BYTES = 1 << 20
# More than one: the buffers of spectral norm may stand still until the weights have changed.
_CHECKED_MICRO_BATCHES = 8


class BufferMutationCheck:
    """Check of the first micro-batches: a module that mutates buffers in forward does so soon."""

    def __init__(self, model: torch.nn.Module, handled: set[int]) -> None:
        """Set the model; ``handled``: ids of buffers that commits update, such as batch norm statistics."""
        self._model, self._handled = model, handled
        self._before: dict[str, torch.Tensor | tuple[int, int]] | None = None
        self._left = _CHECKED_MICRO_BATCHES

    def start(self) -> None:
        """Copy the buffers before a micro-batch that is checked."""
        if self._left > 0:
            self._before = {name: _contents(buffer) for name, buffer in self._buffers().items()}

    def finish(self) -> None:
        """Compare the buffers after the micro-batch. Raise RunError with the name of a changed one."""
        if self._before is None:
            return
        before, self._before = self._before, None
        self._left -= 1
        now = self._buffers()
        for name, buffer in before.items():
            if name in now and _differ(buffer, now[name]):
                raise RunError(
                    f"forward writes into {name}, which would differ between workers with other samples",
                    hint="Keep forward from writing it (eval() on that module), and change it in "
                    "run.on_commit, equally everywhere; or register it with persistent=False, if each worker "
                    "may have its own. Use a BatchNorm, or an InstanceNorm without running statistics.",
                )

    def _buffers(self) -> dict[str, torch.Tensor]:
        tensors = tensors_of(self._model, keep_vars=True)
        return {
            name: tensor
            for name, tensor in tensors.items()
            if not isinstance(tensor, torch.nn.Parameter) and id(tensor) not in self._handled
        }


def _contents(buffer: torch.Tensor) -> torch.Tensor | tuple[int, int]:
    """Return a copy of a buffer; of a large one, its identity and the count of its changes."""
    if buffer.numel() * buffer.element_size() <= _COPIED_BYTES:
        return buffer.clone()
    return id(buffer), 0 if buffer.is_inference() else buffer._version


def _differ(before: torch.Tensor | tuple[int, int], now: torch.Tensor) -> bool:
    if isinstance(before, torch.Tensor):
        return tensor_bytes(before) != tensor_bytes(now)
    return _contents(now) != before
