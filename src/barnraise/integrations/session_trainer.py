"""Mixin that lets a Trainer of Transformers train in a session.

The Trainer keeps its state, callbacks, logging, evaluation and saving. The session brings the micro-batches,
sums their gradients over all workers, clips, steps and heals. What follows a step (logging, evaluation,
saving) runs on every worker, from numbers that are equal on all of them.
"""

from __future__ import annotations

import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from barnraise.core.errors import RunError
from barnraise.integrations import trainer_options as options
from barnraise.integrations.single_process import keep_device
from barnraise.integrations.trainer_notes import (
    CommittedBatch,
    TrainerNotes,
    check_attribute,
    decode_notes,
    encode_notes,
    plain,
)
from barnraise.training.batches import Batches
from barnraise.training.data.loader import EpochOrder, preserved_rng, seed_all, seed_of_sample
from barnraise.training.framework_loop import FrameworkLoop
from barnraise.training.gradients.reducer import MAX_SUMS
from barnraise.training.session import Session
from barnraise.worker.init import init

log = logging.getLogger("barnraise.training")

_Base: Any = object
# Sums of a batch: the loss times its weight, input tokens, operations, tokens as TRL counts them; then a
# number for the names of TRL's metrics, and the metrics, each times the weight. The last one is not zero if
# the main worker wants to stop.
_LOSS, _INPUT_TOKENS, _OPERATIONS, _TRAINED_TOKENS, _NAMES = range(5)
_METRICS, _STOP = 5, MAX_SUMS - 1
_MAX_METRICS = _STOP - _METRICS
# Names of evaluated numbers that are times, which tell nothing about the model.
_TIMES = ("_runtime", "_per_second", "_preparation_time")
_MOST_EVALUATED = 32


class SessionTrainer(_Base):  # type: ignore[misc]
    """Trainer whose steps are shared by all workers of a run.

    ``session``: the one to train in; without it, `barnraise.init` makes one with the seed of the arguments.
    """

    # of the Trainer that this is mixed into
    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(self, *args: Any, session: Session | None = None, **kwargs: Any) -> None:
        self._session = session
        self._loop: FrameworkLoop | None = None
        self._pending: list[CommittedBatch] = []
        self._rate = 0.0  # of the last step
        self._last_step: tuple[float | None, float | None] = (None, None)  # its norm and rate, as reported
        self._is_joined = False
        self._position = 0  # step from which the notes of another worker continue
        self._metric_names: tuple[str, ...] = ()
        self._has_warned = False  # that TRL's metrics are incomplete
        self._wants_stop = self._is_stopped = False  # by an evaluation: here, and by the main worker's
        self._evaluated: dict[str, float] = {}  # the newest metrics of an evaluation
        super().__init__(*args, **kwargs)
        self.args._n_gpu = min(1, self.args.n_gpu)  # never torch.nn.DataParallel
        self._train_batch_size = self.args.train_batch_size

    @property
    def run(self) -> Session:
        """Return the session, for example for ``trainer.run.save("adapter")``."""
        if self._session is None:
            self._session = init(seed=self.args.seed)
        return self._session

    # what the session decides

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator; check the arguments before, because it fails with some of them."""
        options.check_arguments(self.args)
        keep_device(self.args)
        super().create_accelerator_and_postprocess()

    def is_world_process_zero(self) -> bool:
        """Return True on the main worker."""
        if self._session is None:  # before the training, which may never be started
            return os.environ.get("RANK", "0") == "0"
        return self._session.is_main

    def is_local_process_zero(self) -> bool:
        """Return True on the main worker: only that one prints."""
        return self.is_world_process_zero()

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train with all workers of the run."""
        options.check_call(resume_from_checkpoint, trial)
        return super().train(None, None, *args, **kwargs)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; the counterpart of the method that it replaces."""
        args = self.args
        self.accelerator.free_memory()
        self._loop = FrameworkLoop(self.run, "Trainer", _Notes(self))
        loader = self.get_train_dataloader()
        if isinstance(loader.dataset, IterableDataset):
            raise options.no_length()
        epochs, steps_per_epoch, _, samples, _, micro_per_epoch, max_steps = self.set_initial_training_values(
            args, loader
        )
        self._tr_loss = torch.tensor(0.0, device=args.device)
        self._total_loss_scalar, self._globalstep_last_logged, self._initial_global_step = 0.0, 0, 0
        self._init_training_state(max_steps, steps_per_epoch, epochs, None, None)
        model, batches = self._prepare_session(max_steps, loader)
        self._loop.announce_epochs(epochs)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        start = time.time()
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.run.is_main
        self._begin()
        if args.eval_on_start and not self.run.step:
            self._evaluate(None, ignore_keys_for_eval, skip_scheduler=True)
        for epoch in range(self._position // steps_per_epoch, epochs):
            if self.control.should_training_stop:
                break
            if self._has_missed(epoch, steps_per_epoch):
                continue
            self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)

            def report(after_epoch: bool, epoch: int = epoch) -> None:
                self._report(
                    model, epoch, micro_per_epoch, ignore_keys_for_eval, start, after_epoch=after_epoch
                )

            self._train_epoch(model, self._loop.epoch(batches, epoch), epoch, steps_per_epoch, report)
        return self._finalize_training(None, samples, start)

    def _has_missed(self, epoch: int, steps: int) -> bool:
        """Return True if other workers have finished this epoch, and what follows it, without this one."""
        return self._position // steps > epoch

    def _train_epoch(
        self, model: Any, batches: Batches, epoch: int, steps: int, report: Callable[[bool], None]
    ) -> None:
        """Train what is left of an epoch of ``steps``; ``report`` does what follows a step, or the epoch."""
        report(False)  # of a step that the others had just committed when this worker joined
        if not self._should_stop():
            for batch in batches:
                self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
                self._announce_stop()
                for inputs in batch:
                    self._train_on(model, inputs)
                report(False)
                if self._should_stop():
                    break
        if self._has_missed(epoch, steps):
            return  # its evaluation is in the notes already
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        if self._is_stopped:  # one step after the evaluation that decided it
            self.control.should_evaluate = self.control.should_save = False
        report(True)

    def _announce_stop(self) -> None:
        """Tell the others in this step that it is the last one, if this is the main worker and wants it."""
        assert self._loop is not None
        if self._wants_stop and self.run.is_main:
            self._loop.add_sums([0.0] * _STOP + [1.0])

    def _should_stop(self) -> bool:
        if self.control.should_epoch_stop and not self.control.should_training_stop:
            raise options.epoch_stopped()
        return bool(self.control.should_training_stop)

    # before the loop

    def _prepare_session(self, max_steps: int, loader: Any) -> tuple[Any, Batches]:
        """Create optimizer and scheduler, and join the group. Return the model and the batches."""
        args = self.args
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        # Autocast and torch.compile; there is no process group to wrap it for.
        model = self.accelerator.prepare(self.model)
        self.model_wrapped = model
        self.create_scheduler(num_training_steps=max_steps)
        options.check_scheduler(self.lr_scheduler)
        self._call_around_step(self.optimizer)
        run = self.run
        assert self._loop is not None
        batch = self._train_batch_size * args.gradient_accumulation_steps
        self._loop.limit_unit(self._train_batch_size, batch)
        if args.max_grad_norm and args.max_grad_norm > 0:
            run.clip_grad_norm(args.max_grad_norm)
        else:
            run.clip_grad_norm(math.inf)  # measured for the log, and not clipped
        scaler = getattr(self.accelerator, "scaler", None)
        more = [self.lr_scheduler, *([scaler] if scaler is not None else [])]
        # The Trainer moves model and inputs by itself, for example not at all with use_cpu.
        _, _, batches, *_ = run.prepare(
            model, self.optimizer, self._batch_loader(loader), *more, device_placement=False
        )
        run.on_commit(self._note_commit)
        self._is_joined = True
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        return model, batches

    def _batch_loader(self, loader: Any) -> DataLoader[Any]:
        """Return a loader of whole batches, with the samples in the order of the Trainer's own loader."""
        args, own = self.args, self._train_batch_size
        sampler = loader.batch_sampler.sampler
        is_random = isinstance(sampler, RandomSampler)
        is_grouped = type(sampler).__name__ == "LengthGroupedSampler"
        if not (is_random or is_grouped or isinstance(sampler, SequentialSampler)) or getattr(
            sampler, "replacement", False
        ):
            raise options.unknown_order(sampler)
        seed = args.seed if args.data_seed is None else args.data_seed
        if is_random and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = seed  # by the arguments alone, so that it is equal on all workers

        count = len(sampler) // own * own if args.dataloader_drop_last else len(sampler)

        def order(epoch: int) -> Any:
            with preserved_rng():
                seed_all(seed_of_sample(seed, epoch, 0))
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                return numpy.fromiter(iter(sampler), dtype=numpy.int64)[:count]

        workers: dict[str, Any] = {}
        if loader.num_workers:
            workers = {
                "worker_init_fn": loader.worker_init_fn,
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        return DataLoader(
            loader.dataset,
            batch_size=own * args.gradient_accumulation_steps,
            sampler=EpochOrder(count, order),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            **workers,
        )

    def _call_around_step(self, optimizer: Any) -> None:
        """Let the optimizer's step, which the session takes at a commit, call the callbacks around it."""
        original = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self._rate = float(self._get_learning_rate())
            if not self._is_joined:  # this worker replays a step of the others
                return original(*args, **kwargs)
            handler = self.callback_handler
            self.control = handler.on_pre_optimizer_step(self.args, self.state, self.control)
            result = original(*args, **kwargs)
            self.control = handler.on_optimizer_step(self.args, self.state, self.control)
            return result

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step

    # a micro-batch

    def _train_on(self, model: Any, inputs: Any) -> None:
        """Compute a micro-batch: its loss is a mean over its own items, weighted by their number."""
        assert self._loop is not None
        run = self.run
        items = self._get_num_items_in_batch([inputs], self.args.device)
        is_mean_of_items = items is not None and getattr(self, "loss_is_scaled_for_ga", None) is not False
        weight = float(items) if is_mean_of_items else float(self._loop.microbatch_size)
        if is_mean_of_items:
            run.weight(weight)
        if items is not None:
            items = torch.as_tensor(items).clamp(min=1)
        self.current_gradient_accumulation_steps = 1
        metrics = self._metrics["train"] if hasattr(self, "_metrics") else {}
        before = {name: len(values) for name, values in metrics.items()}
        tokens, trained = self.state.num_input_tokens_seen, getattr(self, "_total_train_tokens", 0)
        loss = float(self.training_step(model, inputs, items))
        self._track_num_input_tokens(inputs)
        sums = [
            loss * weight if weight else 0.0,
            float(self.state.num_input_tokens_seen - tokens),
            float(self.floating_point_ops(inputs)),
            float(getattr(self, "_total_train_tokens", 0) - trained),
        ]
        self.state.num_input_tokens_seen = tokens  # counted at the commit, for all workers
        if hasattr(self, "_total_train_tokens"):
            self._total_train_tokens = trained
        metrics.pop("num_tokens", None)
        grown = [name for name, values in metrics.items() if len(values) > before.get(name, 0)]
        self._metric_names = tuple(sorted(grown)[:_MAX_METRICS])
        if len(grown) > _MAX_METRICS:
            self._warn_of_metrics(f"only {_MAX_METRICS} of {len(grown)} metrics are logged")
        values = {name: metrics[name].pop() for name in grown}
        for name in [name for name in grown if not metrics[name]]:
            del metrics[name]  # TRL divides by the length
        sums.append(_number_of(self._metric_names) * weight)
        sums += [float(values[name]) * weight for name in self._metric_names]
        self._loop.log({"loss": loss}, weight)
        self._loop.add_sums(sums)
        self.optimizer.step()
        model.zero_grad()

    def _note_commit(self, run: Session) -> None:
        assert self._loop is not None
        totals = self._loop.totals()
        self._pending.append(
            CommittedBatch(run.done, totals.weight, list(totals.sums), totals.norm, self._rate)
        )

    # after a step

    def _report(
        self,
        model: Any,
        epoch: int,
        micro_per_epoch: int,
        ignore_keys: list[str] | None,
        start: float,
        *,
        after_epoch: bool,
    ) -> None:
        """Log, evaluate and save what is due after the committed steps, or after the epoch."""
        self._set_main()
        while self._pending:
            batch = self._pending.pop(0)
            self._last_step = batch.norm, batch.rate
            self._count(batch)
            accumulated = self.args.gradient_accumulation_steps
            # Not ``epoch``: a worker that returns may be in an earlier one than the others.
            own_epoch, done = divmod(batch.step - 1, -(-micro_per_epoch // accumulated))
            self.state.epoch = own_epoch + min((done + 1) * accumulated, micro_per_epoch) / micro_per_epoch
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._log_save_evaluate(model, epoch, ignore_keys, start)
        if after_epoch:
            self._log_save_evaluate(model, epoch, ignore_keys, start)

    def _log_save_evaluate(self, model: Any, epoch: int, ignore_keys: list[str] | None, start: float) -> None:
        norm, rate = self._last_step
        self._maybe_log_save_evaluate(
            self._tr_loss, norm, model, None, epoch, ignore_keys, start, learning_rate=rate
        )

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and leave the decision to stop by the metrics to the main worker, if there are several.

        The others learn of it in the next step, so that no worker stops while another one trains.
        """
        is_stopping = self.control.should_training_stop
        metrics = super()._evaluate(*args, **kwargs)
        if self.run.world > 1 and not is_stopping:
            self._wants_stop, self.control.should_training_stop = self.control.should_training_stop, False
        return metrics

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; `Session.history` gets the metrics, too."""
        metrics = super().evaluate(*args, **kwargs)
        if self._loop is not None and self._is_joined:
            self._evaluated = _scalars(metrics)
            if self.is_in_train:
                self._loop.log_after_step(self._evaluated)
            else:
                self._loop.amend_history(self._evaluated)
        return metrics

    def _count(self, batch: CommittedBatch) -> None:
        """Add a committed step to the Trainer's state."""
        state, sums, weight = self.state, batch.sums, batch.weight
        if any(sums[_STOP:]):
            self.control.should_training_stop = self._is_stopped = True
        loss = sums[_LOSS] / weight if weight else 0.0
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            loss = float(self._tr_loss) / (1 + state.global_step - self._globalstep_last_logged)
        self._tr_loss += loss
        state.global_step = batch.step
        state.num_input_tokens_seen += round(sums[_INPUT_TOKENS])
        self.current_flos += sums[_OPERATIONS]
        if hasattr(self, "_total_train_tokens"):
            self._total_train_tokens += round(sums[_TRAINED_TOKENS])
            metrics = self._metrics["train"]
            metrics["num_tokens"] = [self._total_train_tokens]
            number = _number_of(self._metric_names)
            if weight and not math.isclose(sums[_NAMES] / weight, number, rel_tol=1e-9):
                # A micro-batch without chosen answers, for example, has no metric of them.
                self._warn_of_metrics("micro-batches with different metrics are left out of the log")
                return
            for name, total in zip(self._metric_names, sums[_METRICS:], strict=False):
                metrics[name].append(total / weight if weight else 0.0)

    def _warn_of_metrics(self, text: str) -> None:
        if not self._has_warned:
            log.warning("%s: %s; the loss has all samples", type(self).__name__, text)
        self._has_warned = True

    def _set_main(self) -> None:
        """Let the callbacks of the main worker write; after its death those of another one."""
        is_main, was_main = self.run.is_main, self.state.is_world_process_zero
        self.state.is_world_process_zero = self.state.is_local_process_zero = is_main
        if is_main and not was_main:
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "setup") and hasattr(callback, "_initialized"):
                    callback._initialized = False  # a tracker: it has started nothing on another worker
            self._begin()

    def _begin(self) -> None:
        """Call the callbacks of the beginning. A decision to stop stays, such as one from a checkpoint."""
        is_stopping = self.control.should_training_stop
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self.control.should_training_stop = is_stopping

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint folder, once on each machine."""
        assert self._loop is not None
        if self._loop.writes:
            super()._save_checkpoint(model, trial)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Finish; load the best model if its folder is on this machine, and warn otherwise."""
        step = self.state.best_global_step
        if self.args.load_best_model_at_end and step is not None and self.state.best_model_checkpoint is None:
            assert self._loop is not None
            folder = os.path.join(self.args.output_dir, f"checkpoint-{step}")
            if self._loop.writes:  # another worker may still be writing it
                self.state.best_model_checkpoint = _folder_of_step(self.args.output_dir, step)
            if self.state.best_model_checkpoint is None and self.run.is_main:
                log.warning(
                    "the best model, of step %d, is not loaded: %s is not on this machine. The model of the "
                    "last step is kept",
                    step,
                    folder,
                )
        if self._evaluated:  # after the last step, no commit brings them into the history
            assert self._loop is not None
            self._loop.amend_history(self._evaluated)
        return super()._finalize_training(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save both as Transformers does, without the session's wrapper in the scheduler's state."""
        wrapper = self.lr_scheduler.__dict__.pop("step", None)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            if wrapper is not None:
                self.lr_scheduler.step = wrapper

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, once on each machine."""
        if self._loop is None or self._loop.writes:
            super().save_model(output_dir, _internal_call)


class _Notes:
    """Notes of a Trainer, for checkpoints and joining workers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def dump(self) -> bytes:
        trainer, state = self._trainer, self._trainer.state
        return encode_notes(
            TrainerNotes(
                global_step=state.global_step,
                epoch=float(state.epoch or 0.0),
                log_history=state.log_history,
                best_metric=None if state.best_metric is None else float(state.best_metric),
                best_global_step=state.best_global_step,
                total_flos=float(state.total_flos) + float(trainer.current_flos),
                input_tokens=state.num_input_tokens_seen,
                trained_tokens=float(getattr(trainer, "_total_train_tokens", 0)),
                loss_unlogged=float(trainer._tr_loss),
                loss_logged=float(trainer._total_loss_scalar),
                last_logged=trainer._globalstep_last_logged,
                is_stopping=bool(trainer.control.should_training_stop),
                callbacks=self._callbacks(),
                pending=trainer._pending,
            )
        )

    def load(self, content: bytes) -> None:
        notes = decode_notes(content)
        trainer, state = self._trainer, self._trainer.state
        state.global_step, state.epoch, state.log_history = (
            notes.global_step,
            notes.epoch,
            notes.log_history,
        )
        state.best_metric, state.best_global_step = notes.best_metric, notes.best_global_step
        state.best_model_checkpoint = _folder_of_step(trainer.args.output_dir, notes.best_global_step)
        state.total_flos, state.num_input_tokens_seen = notes.total_flos, notes.input_tokens
        trainer.current_flos = 0
        if hasattr(trainer, "_total_train_tokens"):
            trainer._total_train_tokens = round(notes.trained_tokens)
        trainer._tr_loss = torch.tensor(notes.loss_unlogged, device=trainer.args.device)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = notes.loss_logged, notes.last_logged
        trainer.control.should_training_stop = notes.is_stopping
        trainer._pending = list(notes.pending)
        trainer._position = max(0, notes.pending[0].step - 1) if notes.pending else notes.global_step
        for name, callbacks in self._exportable().items():
            for callback, attributes in zip(callbacks, notes.callbacks.get(name, ()), strict=False):
                known = callback.state()["attributes"]
                for key in known.keys() & attributes.keys():
                    setattr(callback, key, check_attribute(f"{name}.{key}", attributes[key], known[key]))

    def _exportable(self) -> dict[str, list[Any]]:
        """Return the callbacks whose state can be exported, by the name of their class."""
        by_class: dict[str, list[Any]] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if hasattr(callback, "state") and hasattr(callback, "from_state"):
                by_class.setdefault(type(callback).__name__, []).append(callback)
        return by_class

    def _callbacks(self) -> dict[str, list[dict[str, Any]]]:
        exportable = self._exportable().items()
        return {name: [callback.state()["attributes"] for callback in group] for name, group in exportable}


def _folder_of_step(parent: str, step: int | None) -> str | None:
    """Return the checkpoint folder of a step, if it is on this machine."""
    folder = os.path.join(parent, f"checkpoint-{step}")
    return folder if step is not None and os.path.isdir(folder) else None


def _number_of(names: Sequence[str]) -> int:
    """Return a number by which workers notice that they have added metrics of different names."""
    return 1 + zlib.crc32("\n".join(names).encode()) % (1 << 20)


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation that say something about the model."""
    scalars = {}
    for name, given in metrics.items():
        if name.startswith("eval_") and not name.endswith(_TIMES):
            value = given if isinstance(given, int | float) else plain(given)
            if isinstance(value, int | float):
                scalars[name] = float(value)
    return dict(list(scalars.items())[:_MOST_EVALUATED])


def session_class(trainer: type[Any]) -> type[Any]:
    """Return a subclass of a Trainer's class that trains in a session."""
    if not hasattr(trainer, "_inner_training_loop") or not hasattr(trainer, "training_step"):
        raise RunError(
            f"{trainer.__name__} has no training loop of transformers.Trainer",
            hint="Pass transformers.Trainer, trl.SFTTrainer, or a subclass of one of them.",
        )
    return type(trainer.__name__, (SessionTrainer, trainer), {"__doc__": trainer.__doc__})
