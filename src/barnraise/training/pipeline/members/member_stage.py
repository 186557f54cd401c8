"""State of one member of a group: its stage, what the stage trains, and what else the member holds.

While blocks move, a member keeps the trained state that it had before. It drops it when all members have
theirs. So a second failure is repaired as the first one was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from barnraise.planning.split.stage_placement import ModelParts
from barnraise.training.pipeline.holdings import Run, units_of
from barnraise.training.pipeline.members.model_facts import ModelFacts
from barnraise.training.pipeline.outline import LossFunction, ModelOutline
from barnraise.training.pipeline.passes.activations import ActivationCodec
from barnraise.training.pipeline.passes.order import Order
from barnraise.training.pipeline.stage import Stage
from barnraise.training.pipeline.trained_state import (
    OptimizerFactory,
    ParameterStates,
    SchedulerFactory,
    TrainedState,
)
from barnraise.training.pipeline.weights import StageWeights

_EXPORTED = 3  # times the parameters: their values, and both moments of Adam


class SplitTask(NamedTuple):
    """Model to be trained, and how.

    ``weigh``: returns the weight of a micro-batch, such as its tokens. ``facts``: what all members must have
    alike.
    """

    model: nn.Module
    outline: ModelOutline
    parts: ModelParts
    loss: LossFunction
    weigh: Callable[[Any], float]
    make_optimizer: OptimizerFactory
    make_scheduler: SchedulerFactory | None
    order: Order
    codec: ActivationCodec
    facts: ModelFacts


class KeptState:
    """Trained state outside of a stage, by name. ``schedule``: learning rates and schedulers."""

    def __init__(self) -> None:
        self.states: ParameterStates = {}
        self.schedule: dict[str, Any] = {}

    def clear(self) -> None:
        """Free the memory of the state."""
        self.states, self.schedule = {}, {}


class MemberStage:
    """Parts of a split model that one member holds. ``mirrors``: by the rank whose training is mirrored.

    ``run``: its blocks; None of a spare. ``kept``: trained state beside them, of the same step.
    ``has_frozen``: parts of the model are not trained.
    """

    def __init__(self, task: SplitTask, weights: StageWeights, kept: KeptState) -> None:
        self._task, self._weights, self.kept = task, weights, kept
        self._count = len(task.outline.blocks)
        self.trained = {
            name: parameter for name, parameter in task.model.named_parameters() if parameter.requires_grad
        }
        self.has_frozen = any(not parameter.requires_grad for parameter in task.model.parameters())
        self.stage: Stage | None = None
        self.own = self._trained_state({})
        self.mirrors: dict[int, TrainedState] = {}
        self.run: Run | None = None
        self._mirrored: tuple[Run, ...] = ()

    def names_of_unit(self, unit: int) -> list[str]:
        """Return the names of what is trained in a unit."""
        outline = self._task.outline
        parts = (outline.before, *outline.blocks, outline.after)
        return sorted(parts[unit] & self.trained.keys())

    def names_of_units(self, units: Iterable[int]) -> list[str]:
        """Return the names of what is trained in some units."""
        return sorted(name for unit in units for name in self.names_of_unit(unit))

    def shared_units(self, run: Run) -> list[int]:
        """Return the units that this stage has in common with that of a run of blocks."""
        return sorted({*self.own_units} & {*units_of(run, self._count)})

    def unit_bytes(self) -> dict[int, int]:
        """Return the bytes of the exported state of each unit in which something is trained."""
        named = {unit: self.names_of_unit(unit) for unit in range(self._count + 2)}
        sizes = {
            unit: sum(self.trained[name].numel() * self.trained[name].element_size() for name in names)
            for unit, names in named.items()
        }
        return {unit: _EXPORTED * size for unit, size in sizes.items() if size}

    def held_bytes(self) -> int:
        """Return the bytes of weights and optimizers that this member holds, mirrors included."""
        copies = sum(value.nbytes for each in self.mirrors.values() for value in each.parameters.values())
        kept = sum(each.optimizer_bytes() for each in (self.own, *self.mirrors.values()))
        return self._weights.held_bytes() + copies + kept

    def names_of_run(self, run: Run | None) -> list[str]:
        """Return the names of what the stage of a run of blocks trains."""
        return sorted(self._task.outline.names(*run) & self.trained.keys()) if run is not None else []

    @property
    def own_units(self) -> tuple[int, ...]:
        """Return the units of the stage."""
        return units_of(self.run, self._count)

    @property
    def other_units(self) -> tuple[int, ...]:
        """Return the units of all mirrors, and those that are kept."""
        units = {unit for run in self._mirrored for unit in units_of(run, self._count)}
        if self.kept.states:
            every = ((unit, self.names_of_unit(unit)) for unit in range(self._count + 2))
            units |= {unit for unit, names in every if self.kept.states.keys() >= set(names)}
        return tuple(sorted(units))

    def build(self, run: Run | None, mirrored: Mapping[int, Run]) -> None:
        """Load the weights of a stage, and make its optimizer and those of mirrors, with new state."""
        task, outline = self._task, self._task.outline
        if self.stage is not None:
            self.stage.undo()
        names = outline.names(*run) if run is not None else frozenset()
        self._weights.drop_all_but(names)
        self._weights.load(names)
        self.stage = Stage(task.model, outline, *run, task.loss) if run is not None else None
        parameters = dict(task.model.named_parameters())
        self.own = self._trained_state({name: parameters[name] for name in self.names_of_run(run)})
        self.mirrors = {
            rank: self._trained_state(self._weights.copies(self.names_of_run(other)))
            for rank, other in mirrored.items()
        }
        self.run, self._mirrored = run, tuple(mirrored.values())

    def load(self, states: ParameterStates, schedule: Mapping[str, Any]) -> None:
        """Load the state of what is trained and mirrored here. Each takes tensors of its own."""
        taken: set[str] = set()
        for state in (self.own, *self.mirrors.values()):
            own = {name: states[name] for name in state.parameters}
            own |= {name: copy.deepcopy(states[name]) for name in taken & own.keys()}
            state.load(own)
            state.load_schedule(schedule)
            taken |= own.keys()

    def export(self) -> ParameterStates:
        """Return the state of all that this member holds, by name."""
        states = dict(self.kept.states)
        for state in (*self.mirrors.values(), self.own):
            if state.parameters:
                states |= state.export(list(state.parameters))
        return states

    def export_unit(self, unit: int) -> ParameterStates:
        """Return the state of a unit that is trained or mirrored here."""
        names = self.names_of_unit(unit)
        each = next(
            state for state in (self.own, *self.mirrors.values()) if state.parameters.keys() >= set(names)
        )
        return each.export(names)

    def export_schedule(self) -> dict[str, Any]:
        """Return learning rates and schedulers; empty if nothing is trained here."""
        schedules = (state.export_schedule() for state in (self.own, *self.mirrors.values()))
        return self.kept.schedule or next(filter(None, schedules), {})

    def apply(self, factor: float) -> None:
        """Apply the gradients of a step, multiplied by a factor, here and in the mirrors."""
        self.kept.clear()
        for state in (self.own, *self.mirrors.values()):
            state.apply(factor)

    def _trained_state(self, parameters: Mapping[str, nn.Parameter]) -> TrainedState:
        return TrainedState(parameters, self._task.make_optimizer, self._task.make_scheduler)
