"""Trained parameters of a stage with their optimizer, and their exchange between machines by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.core.errors import ProtocolError, RunError

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], Any]
ParameterStates = dict[str, dict[str, Any]]  # by name: the value, and what the optimizer keeps


class TrainedState:
    """Parameters that one optimizer trains. A mirror of another stage has the same form."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: OptimizerFactory,
        make_scheduler: SchedulerFactory | None,
    ) -> None:
        self.parameters = {name: parameters[name] for name in sorted(parameters)}
        self.optimizer, self.scheduler = None, None
        if self.parameters:
            self.optimizer = make_optimizer(list(self.parameters.values()))
            self.scheduler = make_scheduler(self.optimizer) if make_scheduler is not None else None

    def clear_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def optimizer_bytes(self) -> int:
        """Return the bytes that the optimizer keeps on the device of the parameters."""
        if self.optimizer is None:
            return 0
        kept = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))

    def squared_norm(self) -> float:
        """Return the squared norm of the gradients; a parameter without one counts as zero."""
        return sum(
            float(parameter.grad.detach().cpu().double().square().sum())  # an Apple GPU has no float64
            for parameter in self.parameters.values()
            if parameter.grad is not None
        )

    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of a parameter; zeros if it has none."""
        parameter = self.parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def pack_gradients(self, names: Sequence[str] | None = None) -> torch.Tensor:
        """Return the gradients of some or all parameters as bytes on the CPU, in the order of their names."""
        content = b"".join(bytes(tensor_bytes(self.gradient(name))) for name in names or self.parameters)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)

    def gradient_bytes(self, names: Sequence[str] | None = None) -> int:
        """Return the size of what `pack_gradients` returns."""
        return sum(self.parameters[name].nbytes for name in names or self.parameters)

    def unpacked(self, packed: torch.Tensor, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return by name the gradients that another machine has packed."""
        start, gradients = 0, {}
        for name in names or self.parameters:
            parameter = self.parameters[name]
            flat = packed[start : start + parameter.nbytes].clone().view(parameter.dtype)
            gradients[name] = flat.view(parameter.shape).to(parameter.device)
            start += parameter.nbytes
        return gradients

    def apply(self, factor: float) -> None:
        """Apply the gradients, multiplied by a factor, and forget them."""
        if self.optimizer is None:
            return
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif factor != 1.0:
                parameter.grad.mul_(factor)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.clear_gradients()

    # exchange

    def export(self, names: Sequence[str]) -> ParameterStates:
        """Return the states of parameters, on the CPU."""
        assert self.optimizer is not None
        states: ParameterStates = {}
        for name in names:
            parameter = self.parameters[name]
            memory = {
                key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
                for key, value in self.optimizer.state.get(parameter, {}).items()
            }
            states[name] = {"value": parameter.detach().cpu(), "memory": memory}
        return states

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load states of parameters that `export` returned, here or elsewhere."""
        if not states:
            return
        assert self.optimizer is not None
        with torch.no_grad():
            for name, state in states.items():
                parameter = self.parameters[name]
                if state["value"].shape != parameter.shape:
                    raise ProtocolError(f"another worker sent {name} with another shape")
                parameter.copy_(state["value"])
                memory = {
                    key: self._placed(key, value, parameter) if isinstance(value, torch.Tensor) else value
                    for key, value in state["memory"].items()
                }
                if memory:
                    self.optimizer.state[parameter] = memory

    def export_schedule(self) -> dict[str, Any]:
        """Return what changes with the steps and is no parameter's: learning rates and schedulers."""
        if self.optimizer is None:
            return {}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        state = self.scheduler.state_dict() if self.scheduler is not None else {}
        plain = {key: value for key, value in state.items() if not callable(value) and key != "lr_lambdas"}
        return {"groups": groups, "scheduler": plain}

    def load_schedule(self, schedule: Mapping[str, Any]) -> None:
        """Load what `export_schedule` returned; an empty one changes nothing."""
        if self.optimizer is None or not schedule:
            return
        groups = self.optimizer.param_groups
        if len(groups) != len(schedule["groups"]):
            raise RunError(
                "the optimizer has another number of parameter groups on another machine",
                hint="Let the function make the same groups for any list of parameters.",
            )
        for group, saved in zip(groups, schedule["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if self.scheduler is not None:
            lambdas = getattr(self.scheduler, "lr_lambdas", None)
            more = {} if lambdas is None else {"lr_lambdas": [None] * len(lambdas)}
            self.scheduler.load_state_dict({**schedule["scheduler"], **more})

    def _placed(self, key: str, value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Return a tensor of the optimizer's memory where the optimizer keeps it.

        That is the device of the parameter. Only Adam counts its steps on the CPU, unless it is fused.
        """
        assert self.optimizer is not None
        if key != "step":
            return value.to(parameter.device)
        groups = self.optimizer.param_groups
        own = next(group for group in groups if any(each is parameter for each in group["params"]))
        is_on_device = own.get("fused") or own.get("capturable")
        return value.to(parameter.device) if is_on_device else value.clone()
