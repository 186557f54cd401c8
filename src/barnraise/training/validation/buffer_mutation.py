"""Detection of buffers that a forward pass mutates: they would differ between workers."""

from __future__ import annotations

import torch

from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.core.errors import RunError
from barnraise.training.state.training_state import tensors_of


class BufferMutationCheck:
    """Check of the first micro-batch only: a module that mutates buffers in forward does so every time."""

    def __init__(self, model: torch.nn.Module, handled: set[int]) -> None:
        """Set the model; ``handled``: ids of buffers that commits update, such as batch norm statistics."""
        self._model, self._handled = model, handled
        self._before: dict[str, torch.Tensor] | None = None
        self._is_done = False

    def start(self) -> None:
        """Copy the buffers before the first micro-batch."""
        if not self._is_done:
            self._before = {name: buffer.clone() for name, buffer in self._buffers().items()}

    def finish(self) -> None:
        """Compare the buffers after the first micro-batch. Raise RunError with the name of a changed one."""
        if self._before is None:
            return
        before, self._before, self._is_done = self._before, None, True
        now = self._buffers()
        for name, buffer in before.items():
            if name in now and tensor_bytes(buffer) != tensor_bytes(now[name]):
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
