"""Checkpoint of a split model: the trained state of all stages, without the split that it came from.

It has the form that ``barnraise export`` reads.
"""

from __future__ import annotations

from typing import Any

from barnraise.checkpoint.adapter_files import AdapterDescription
from barnraise.checkpoint.serialization import FlatState, flatten, unflatten
from barnraise.core.errors import RunError
from barnraise.training.pipeline.trained_state import ParameterStates


class SplitCheckpoint:
    """Trained state outside of a stage, by name. ``schedule``: learning rates and schedulers."""

    def __init__(self, adapter: AdapterDescription | None) -> None:
        self.states: ParameterStates = {}
        self.schedule: dict[str, Any] = {}
        self._adapter = adapter

    def clear(self) -> None:
        """Free the memory of the state."""
        self.states, self.schedule = {}, {}

    def flatten(self, done: int, *, is_checkpoint: bool = False) -> FlatState:
        """Return the state as a skeleton and tensors; ``done``: committed steps."""
        adapter = {} if self._adapter is None else {"adapter": self._adapter._asdict()}
        return flatten(
            {
                **adapter,
                "model": {name: state["value"] for name, state in self.states.items()},
                "base": {"hashes": None, "trained": sorted(self.states), "unfrozen": {}},
                "split": {
                    "memory": {name: state["memory"] for name, state in self.states.items()},
                    "schedule": self.schedule,
                },
                "done": done,
            }
        )

    def load(self, parts: FlatState, source: str = "the others", *, is_checkpoint: bool = False) -> int:
        """Load what `flatten` returned. Return its number of committed steps."""
        state = unflatten(parts.skeleton, parts.tensors)
        if "split" not in state:
            raise RunError(
                f"{source} is of a training whose model was not split",
                hint="Start a new run for the split model.",
            )
        memory = state["split"]["memory"]
        self.states = {
            name: {"value": value, "memory": memory[name]} for name, value in state["model"].items()
        }
        self.schedule = state["split"]["schedule"]
        return int(state["done"])
