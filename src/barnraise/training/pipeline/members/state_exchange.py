"""Exchange of trained state between the members of a group, by units of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from barnraise.checkpoint.serialization import FlatState, flatten, shapes, unflatten
from barnraise.core.decoding import decode
from barnraise.core.errors import ProtocolError
from barnraise.training.group.interface import TrainingCollectives
from barnraise.training.pipeline.holdings import Transfer
from barnraise.training.pipeline.trained_state import ParameterStates

_UNREADABLE = "the trained state of another worker cannot be read"
_GROUPS, _SCHEDULER = "groups", "scheduler"
_skeletons = msgspec.msgpack.Decoder(list[bytes])


class StateExchange:
    """Sends and receives trained state. ``names_of_unit``: of what is trained in a unit of the model.

    ``trained``: parameters by name, with or without memory.
    """

    def __init__(
        self, names_of_unit: Callable[[int], Sequence[str]], trained: Mapping[str, nn.Parameter]
    ) -> None:
        self._names_of_unit, self._trained = names_of_unit, trained

    def run(
        self,
        group: TrainingCollectives,
        transfers: Sequence[Transfer],
        held: ParameterStates,
        schedule: Mapping[str, Any],
        sources: Collection[int],
    ) -> tuple[ParameterStates, dict[str, Any]]:
        """Send and receive trained state. Return it by name, and a schedule. All members call it together.

        ``held``: what this member can send. ``schedule``: its learning rates. Of the ranks ``sources``, the
        first one that has a schedule gives it.
        """
        outgoing = [
            (each, flatten({name: held[name] for name in self._names_of_unit(each.unit)}))
            for each in transfers
            if each.sender == group.rank
        ]
        own = [flatten(schedule).skeleton, *(parts.skeleton for _, parts in outgoing)]
        messages = group.all_gather_bytes(msgspec.msgpack.encode(own))
        skeletons = [decode(_skeletons, message, _UNREADABLE) for message in messages]
        works, arriving = [], []
        for each, parts in outgoing:
            works += [group.send_async(value.contiguous(), each.receiver) for value in parts.tensors]
        for rank, announced in enumerate(skeletons):
            sent = [each for each in transfers if each.sender == rank]
            if len(sent) != len(announced) - 1:
                raise ProtocolError("a worker sends other parts of the model than those that were asked for")
            for each, skeleton in zip(sent, announced[1:], strict=True):
                if each.receiver != group.rank:
                    continue
                tensors = self._buffers(each.unit, skeleton)
                works += [group.receive_async(tensor, rank) for tensor in tensors]
                arriving.append((each.unit, FlatState(skeleton, tensors)))
        for work in works:
            work.wait()
        received: ParameterStates = {}
        for unit, parts in arriving:
            received |= self._checked(unit, unflatten(parts.skeleton, parts.tensors))
        schedules = (unflatten(skeletons[rank][0], []) for rank in sorted(sources))
        return received, checked_schedule(next(filter(None, schedules), {}))

    def _checked(self, unit: int, states: Any) -> ParameterStates:
        """Return the received state of a unit. Raise ProtocolError if it is something else."""
        names = sorted(self._names_of_unit(unit))
        if (
            not isinstance(states, dict)
            or sorted(states) != names
            or not all(map(is_state, states.values()))
        ):
            raise ProtocolError("another worker sends other trained state than was asked for")
        return states

    def _buffers(self, unit: int, skeleton: bytes) -> list[torch.Tensor]:
        """Return memory for a unit that another worker sends. Raise ProtocolError if it is too large."""
        forms = shapes(skeleton)
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in forms)
        own = sum(self._trained[name].numel() for name in self._names_of_unit(unit))
        if size > 8 * 8 * own + (1 << 20):  # no optimizer keeps more than seven values of eight bytes
            raise ProtocolError("another worker sends more trained state than the model has")
        return [torch.empty(shape, dtype=dtype) for dtype, shape in forms]

    def gather_values(
        self,
        group: TrainingCollectives,
        own: Mapping[str, torch.Tensor],
        names: Sequence[Sequence[str]],
    ) -> dict[str, torch.Tensor]:
        """Return the values of all trained parameters, on every member.

        ``own``: the values here. ``names``: of the parameters that each member sends.
        """
        everything = dict(own)
        works = []
        for rank, sent in enumerate(names):
            for name in sent:
                if rank == group.rank:
                    others = (to for to in range(len(names)) if to != rank)
                    works += [group.send_async(own[name].contiguous(), to) for to in others]
                else:
                    like = self._trained[name]
                    everything[name] = torch.empty(like.shape, dtype=like.dtype)
                    works.append(group.receive_async(everything[name], rank))
        for work in works:
            work.wait()
        return everything


def is_state(state: Any) -> bool:
    """Tell whether this is the state of a parameter: its value, and what the optimizer keeps."""
    return (
        isinstance(state, dict)
        and state.keys() == {"value", "memory"}
        and isinstance(state["value"], torch.Tensor)
        and isinstance(state["memory"], dict)
    )


def checked_schedule(schedule: Any) -> dict[str, Any]:
    """Return received learning rates. Raise ProtocolError if they are something else."""
    if schedule == {}:
        return {}
    if (
        not isinstance(schedule, dict)
        or schedule.keys() != {_GROUPS, _SCHEDULER}
        or not isinstance(schedule[_GROUPS], list | tuple)
        or not all(isinstance(group, dict) for group in schedule[_GROUPS])
        or not isinstance(schedule[_SCHEDULER], dict)
    ):
        raise ProtocolError("another worker sends learning rates that cannot be read")
    return schedule
