"""GradScaler: each loss is scaled as ever, but the whole batch's gradient is judged, and unscaled once.

torch's own scaler looks for infinities in the gradients at each call. A unit's gradient is only a part of the
step's, so here every member looks at the same reduced sum and comes to the same verdict.
"""

from __future__ import annotations

from typing import Any

import torch


class ScalerAdapter:
    """A scaler given to `prepare`; without one, nothing is scaled."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.scaler is not None:
            self.scaler.step = self._step  # type: ignore[method-assign]
            self.scaler.unscale_ = self._unscale  # type: ignore[method-assign]
            self.scaler.update = self._update  # type: ignore[method-assign]

    def factor(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def follow(self, *, finite: bool) -> None:
        """Grow or back off, as torch would have done."""
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
        """Clipping on a unit's gradient is refused where the step is taken; see `Sums.take`."""

    @staticmethod
    def _update(new_scale: Any = None) -> None:
        """The scale follows commits."""
