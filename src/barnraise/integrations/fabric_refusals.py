"""Uses of Fabric that a session cannot honour; each is rejected by name, with a hint."""

from __future__ import annotations

from typing import Any

from barnraise.core.errors import RunError

_SETUP = "Call it before the first batch of the training."


def refuse(name: str, hint: str) -> RunError:
    """Return the error for a call or an option that has no meaning in a session."""
    return RunError(f"Fabric in a session does not support {name}", hint=hint)


def other_launcher(world: int) -> RunError:
    """Return the error for processes that another launcher started."""
    hint = "Start the script with `barnraise run`, or with python on one machine."
    return refuse(f"a launcher that started {world} processes", hint)


def wrong_device(accelerator: Any, device: object) -> RunError:
    """Return the error for an accelerator of Fabric that cannot use the worker's device."""
    hint = "Create Fabric(accelerator='cpu', ...), or set BARNRAISE_DEVICE."
    return refuse(f"{type(accelerator).__name__} with this worker's device {device}", hint)


def too_late(call: str) -> RunError:
    """Return the error for a setup or a load after the training has begun."""
    return RunError(f"{call} was called after the training had begun", hint=_SETUP)


def loaded_too_late() -> RunError:
    """Return the error for ``fabric.load`` in a training, which changes this worker's state alone."""
    hint = f"{_SETUP} To continue a run use `barnraise resume RUN`, which needs no file of the script."
    return RunError("fabric.load was called after the training had begun", hint=hint)


def nothing_set_up() -> RunError:
    """Return the error for a loop without a model and an optimizer."""
    return RunError(
        "the training begins without an optimizer",
        hint="Call model, optimizer = fabric.setup(model, optimizer) before the loop.",
    )


def no_loader() -> RunError:
    """Return the error for epochs without a loader."""
    return RunError(
        "the training begins without a loader",
        hint="Call loader = fabric.setup_dataloaders(loader) before the loop; the first one is trained on.",
    )


def several_models() -> RunError:
    """Return the error for optimizers that train several modules."""
    hint = "Put them into one torch.nn.ModuleDict, and call fabric.setup once with it and all optimizers."
    return refuse("training of several modules", hint)


def outside_loop(call: str) -> RunError:
    """Return the error for a step or a backward without a micro-batch."""
    return RunError(
        f"{call} was called outside of the loop over the training's loader",
        hint="Train on the first loader that is given to fabric.setup_dataloaders.",
    )


def missing_step(count: int) -> RunError:
    """Return the error for an iteration in which optimizers did not step."""
    return RunError(
        f"an iteration ended without optimizer.step() of {count} of the optimizers",
        hint="Call step() of each optimizer after fabric.backward(). "
        "To accumulate the gradients of k batches, pass BarnraiseStrategy(accumulate=k).",
    )


def sync_without_accumulation() -> RunError:
    """Return the error for ``no_backward_sync`` in a strategy that does not accumulate."""
    hint = "Pass BarnraiseStrategy(accumulate=k) for steps of k batches."
    return refuse("fabric.no_backward_sync without accumulation", hint)


def uneven_accumulation(samples: int, batch: int, count: int) -> RunError:
    """Return the error for an epoch that ends within an accumulated step."""
    hint = "Give the loader drop_last=True, or another batch_size."
    return RunError(
        f"{samples} samples are no multiple of {count} accumulated batches of {batch} samples", hint=hint
    )


def unclipped(max_norm: float, given: float | None) -> RunError:
    """Return the error for a norm that the strategy does not know."""
    known = "none" if given is None else f"{given:g}"
    return RunError(
        f"fabric.clip_gradients was called with max_norm={max_norm:g}, and the strategy has {known}",
        hint=f"Pass BarnraiseStrategy(max_norm={max_norm:g}): it clips the gradient of each whole step, "
        "also on workers that have no part of it.",
    )


def changed_rate(optimizer: Any) -> RunError:
    """Return the error for a learning rate that the script has set by itself."""
    return RunError(
        f"the script changed the learning rate, or another option, of {type(optimizer).__name__}",
        hint="Make a scheduler before fabric.setup, for example LambdaLR, and pass it there: "
        "fabric.setup(model, optimizer, scheduler=scheduler). It moves with every step of all workers.",
    )


def collective_in_loop(call: str) -> RunError:
    """Return the error for a collective that workers reach different numbers of times."""
    return RunError(
        f"{call} was called in the loop over micro-batches, whose number differs between workers",
        hint="Average with fabric.strategy.run.log(loss=loss), and read run.history. "
        "Call collectives after the loop.",
    )


def collective_before_start(call: str) -> RunError:
    """Return the error for a collective without a group."""
    return RunError(
        f"{call} was called before the workers have met",
        hint="Call it after the loop over the training's loader.",
    )


def epochs_needed(call: str) -> RunError:
    """Return the error for a loop over epochs that a joining worker would start from 0."""
    return RunError(
        f"{call} needs to know the epoch of a worker that joins late",
        hint="Write `for epoch in strategy.epochs(10):` instead of range(10), with "
        "fabric = Fabric(strategy=strategy).",
    )
