"""GradScaler support: losses are scaled as usual, and the gradient of the whole batch is unscaled once.

torch's scaler looks for infinities in the gradients at each call. A micro-batch's gradient is only a part of
the step's. Here every worker checks the same all-reduced gradient, and so all decide alike.
"""

from __future__ import annotations

from typing import Any

import torch


class ScalerAdapter:
    """Wrapper of the GradScaler given to `prepare`; without one, the scale is 1."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.scaler is not None:
            self.scaler.step = self._step  # type: ignore[method-assign]
            self.scaler.unscale_ = self._unscale  # type: ignore[method-assign]
            self.scaler.update = self._update  # type: ignore[method-assign]

    def factor(self) -> float:
        """Return the current scale of the loss."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def update(self, *, finite: bool) -> None:
        """Grow the scale or back off after a step, as torch does."""
        if self.scaler is None:
            return
        state = self.scaler.state_dict()
        tracker = state["_growth_tracker"] + 1 if finite else 0
        if not finite:
            state["scale"] *= state["backoff_factor"]
        elif tracker == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            tracker = 0
        self.scaler.load_state_dict({**state, "_growth_tracker": tracker})

    @staticmethod
    def _step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step()

    @staticmethod
    def _unscale(optimizer: Any) -> None:
        """Ignore the call: the step unscales. Clipping afterwards is rejected by the reducer."""

    @staticmethod
    def _update(new_scale: Any = None) -> None:
        """Ignore the call: the scale follows commits."""
