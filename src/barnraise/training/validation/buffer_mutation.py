"""What a forward pass writes into buffers, but for batch norms: it would differ from member to member."""

from __future__ import annotations

import torch

from barnraise.checkpoint.serialization import as_bytes
from barnraise.core.errors import RunError
from barnraise.training.state.names_in_state import tensors_of


class BufferMutationCheck:
    """Looks once, around the first unit: who writes, writes in every one."""

    def __init__(self, model: torch.nn.Module, handled: set[int]) -> None:
        """``handled``: the buffers, by identity, that follow commits."""
        self._model, self._handled = model, handled
        self._before: dict[str, torch.Tensor] | None = None
        self._has_looked = False

    def begin(self) -> None:
        if not self._has_looked:
            self._before = {name: one.clone() for name, one in self._buffers().items()}

    def end(self) -> None:
        """RunError with the name of what was written."""
        if self._before is None:
            return
        before, self._before, self._has_looked = self._before, None, True
        now = self._buffers()
        for name, one in before.items():
            if name in now and as_bytes(one) != as_bytes(now[name]):
                raise RunError(
                    f"forward writes into {name}, which would differ between members: each has other samples",
                    hint="Keep forward from writing it (eval() on that module), and change it in "
                    "run.on_commit, alike everywhere; or register it with persistent=False, if each member "
                    "may have its own. Use a BatchNorm, or an InstanceNorm without running statistics.",
                )

    def _buffers(self) -> dict[str, torch.Tensor]:
        found = tensors_of(self._model, keep_vars=True)
        return {
            name: one
            for name, one in found.items()
            if not isinstance(one, torch.nn.Parameter) and id(one) not in self._handled
        }
