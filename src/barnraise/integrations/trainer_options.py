"""Options of Transformers' Trainer that a session cannot honour; each is rejected by name, with a hint."""

from __future__ import annotations

from typing import Any

from barnraise.core.errors import RunError

_RESUME = (
    "Resume the run instead: `barnraise resume RUN`. Checkpoints of the session are saved by themselves."
)
# Optimizers that update parameters in backward, or hold two sets of parameters.
_OPTIMIZERS = ("lomo", "adalomo", "layerwise", "schedule_free")
_PLATEAU = "Use a scheduler that moves with steps, such as 'cosine'."


def check_arguments(args: Any) -> None:
    """Raise RunError for an argument of ``TrainingArguments`` that has no meaning in a session."""
    optimizer = _text(args.optim)
    problems = {
        "deepspeed": (args.deepspeed, "Remove it: each worker holds the whole model."),
        "fsdp": (args.fsdp, "Remove it: each worker holds the whole model. See docs/sharded.md for FSDP2."),
        "parallelism_config": (
            getattr(args, "parallelism_config", None),
            "Remove it: each worker holds the whole model and has its own samples.",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "Remove it: a worker that runs out of memory splits its micro-batches by itself.",
        ),
        "train_sampling_strategy='batch_rebalance'": (
            _text(getattr(args, "train_sampling_strategy", "")) == "batch_rebalance",
            "Use 'random', 'sequential' or 'group_by_length'.",
        ),
        "enable_jit_checkpoint": (getattr(args, "enable_jit_checkpoint", False), _RESUME),
        f"optim={optimizer!r}": (
            any(name in optimizer for name in _OPTIMIZERS),
            "Use an optimizer that changes parameters in step() only, such as 'adamw_torch'.",
        ),
        f"lr_scheduler_type={_text(args.lr_scheduler_type)!r}": (
            _text(args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy"),
            _PLATEAU,
        ),
        "a process group of Accelerate": (
            args.world_size > 1,
            "Import barnraise.integrations.transformers before you create TrainingArguments.",
        ),
    }
    for name, (is_set, hint) in problems.items():
        if is_set:
            raise _unsupported(name, hint)


def check_call(resume_from_checkpoint: object, trial: object) -> None:
    """Raise RunError for an argument of ``train()`` that has no meaning in a session."""
    if resume_from_checkpoint:
        raise _unsupported("resume_from_checkpoint", _RESUME)
    if trial is not None:
        raise _unsupported("hyperparameter_search", "Start one run for each set of values.")


def check_scheduler(scheduler: Any) -> None:
    """Raise RunError for a scheduler that moves by a metric."""
    name = type(scheduler).__name__
    if name in ("ReduceLROnPlateau", "GreedyLR"):
        raise _unsupported(f"the scheduler {name}", _PLATEAU)


def no_length() -> RunError:
    """Return the error for a dataset without a length."""
    hint = "Use a dataset with a length, such as datasets.Dataset instead of streaming=True."
    return _unsupported("a train_dataset without a length", hint)


def unknown_order(sampler: Any) -> RunError:
    """Return the error for a sampler whose order other workers cannot know."""
    hint = "Use train_sampling_strategy 'random', 'sequential' or 'group_by_length'."
    return _unsupported(f"the sampler {type(sampler).__name__}", hint)


def epoch_stopped() -> RunError:
    """Return the error for a callback that ends an epoch before its last step."""
    return _unsupported("control.should_epoch_stop", "Set control.should_training_stop, or use max_steps.")


def _unsupported(name: str, hint: str) -> RunError:
    return RunError(f"Trainer in a session does not support {name}", hint=hint)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value) or "")
