"""Training session: the API of a script, whose steps are exact no matter which workers compute them.

The loader that `prepare` returns yields one batch for each step, and a batch yields this worker's
micro-batches (see `batches`). ``optimizer.step()`` after a micro-batch accumulates its gradients. After this
worker's last micro-batch of a step, it finishes the step with all workers: see `steps.step_loop`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from barnraise.checkpoint.files import write_model
from barnraise.checkpoint.serialization import decode_tensor, encode_tensor
from barnraise.core.errors import RunError
from barnraise.planning import Levels, ModelSize, StepTimes
from barnraise.planning.inputs.levels import OPEN
from barnraise.training.autotune.group_observer import GroupObserver
from barnraise.training.autotune.profiler import profiled
from barnraise.training.autotune.tuner import SyncMode, SyncTuner
from barnraise.training.batches import TWO_LOOPS, AssignedParts, Batch, Batches
from barnraise.training.data.iterable import IterableLoader
from barnraise.training.data.loader import MicroBatchLoader
from barnraise.training.device_placement import move_batch, place_model
from barnraise.training.gradients.batch_norm_stats import BatchNormStats
from barnraise.training.gradients.grad_scaler import ScalerAdapter
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.group.agent_client import WorkerId
from barnraise.training.group.interface import GroupManager
from barnraise.training.hub.group_client import GroupHubClient
from barnraise.training.hub.leased_data import LeasedData
from barnraise.training.hub.parameter_server import ParameterServer
from barnraise.training.hub.step_loop import HubStepLoop
from barnraise.training.local_sgd import LocalSgd
from barnraise.training.mapping.mapper import Mapper
from barnraise.training.metrics import MetricsLog
from barnraise.training.pipeline.split_session import SplitSession
from barnraise.training.progress_report import ProgressReporter
from barnraise.training.record.recorder import RunRecorder
from barnraise.training.record.sinks import open_sink
from barnraise.training.recovery.failure_notice import install_failure_notice
from barnraise.training.recovery.live_recovery import RecoveryStats
from barnraise.training.recovery.out_of_memory import MicroBatchPart, OutOfMemoryGuard
from barnraise.training.state.adapter import describe_adapter, ids_of_adapter, is_adapter_folder, save_adapter
from barnraise.training.state.bitwise_sync import BitwiseSync, arithmetic_of
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.state.frozen_base import FrozenBase
from barnraise.training.state.training_state import Notes, TrainingState
from barnraise.training.steps.commit import StepContext
from barnraise.training.steps.provisional import ProvisionalSteps
from barnraise.training.steps.step_loop import StepLoop
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync
from barnraise.training.validation.buffer_mutation import BufferMutationCheck
from barnraise.training.validation.checks import (
    check_all_taken,
    check_prepared,
    parameters_of,
    unused_device,
)

log = logging.getLogger("barnraise.training")

_SCALER, _HUB = "barnraise.scaler", "barnraise.hub"


class Session(SplitSession):
    """A training in which several workers share every batch. Create it with `barnraise.init`."""

    def __init__(
        self,
        manager: GroupManager,
        *,
        seed: int,
        unit: int,
        checkpoints: CheckpointManager,
        mixed: bool = False,
        base_may_differ: bool = False,
        sync: SyncMode | Sync = "exact",
        levels: Levels = OPEN,
        parameter_server: ParameterServer | None = None,
        is_site: bool = False,
    ) -> None:
        """Set the session up; ``is_site``: this group is one member of a hub.

        ``parameter_server`` is None on machines of a site that cannot talk to the hub.
        """
        self.next_epoch = 0  # of the next pass over the batches
        self._manager = manager
        self._checkpoints = checkpoints
        self._seed = seed
        self._unit_size = unit
        self._mixed, self._base_may_differ = mixed, base_may_differ
        self._sync, self._levels = sync, levels
        self._parameter_server, self._is_site = parameter_server, is_site
        self._model: torch.nn.Module | None = None
        self._batch_device: torch.device | None = None
        self._optimizers: list[Optimizer] = []
        self._tracked: dict[str, Any] = {}
        self._clip: float | None = None
        self._notes: Notes | None = None
        self._current: MicroBatchPart | None = None
        self._stepped: list[Optimizer] = []  # in the current micro-batch
        self._parts_done = 0  # of a micro-batch that is computed in parts
        self._weight: float | None = None
        self._in_batch = False
        self._epochs: int | None = None  # that the script asked for
        self._round_progress = (0, 0)  # the batches before the round, and those of it that the loop has left
        self._assigned: AssignedParts | None = None
        self._throughput = Throughput()
        self._oom_guard = OutOfMemoryGuard.from_environment()
        self._metrics = MetricsLog()
        self._mapper = Mapper(manager, seed, checkpoints.maps_folder)

    @property
    def _may_split(self) -> bool:
        is_at_hub = self._parameter_server is not None or self._is_site
        return not (is_at_hub or self._model is not None or self._tracked or self._mapper.has_mapped)

    # the script's API

    @property
    def done(self) -> int:
        """Return the number of committed steps, counted in batches of the loader."""
        return self._state.covered if self._split is None else self._split.loop.done

    @property
    def step(self) -> int:
        """Return the number of steps that are finished, from the start of the training.

        In the loop over the batches it is one larger after each iteration, on all workers alike.
        """
        if self._split is not None:
            return self._split.loop.done
        start, left = self._round_progress
        covered = self._step_loop.round_start
        return covered + (left if covered == start else 0)

    @property
    def total_steps(self) -> int | None:
        """Return the steps of all epochs; None before `epochs` is called, for a stream and with a hub."""
        data = self._data if self._split is None else self._split.data
        if self._epochs is None or isinstance(data, IterableLoader | LeasedData):
            return None
        return self._epochs * len(data)

    @property
    def healed(self) -> RecoveryStats | None:
        """Return how this worker received the state, if it joined while the others trained."""
        return self._step_loop.recovery_stats

    @property
    def rank(self) -> int:
        """Return the number of this worker in the current group; it changes with the group."""
        return self._manager.rank

    @property
    def world(self) -> int:
        """Return the number of workers that train together now."""
        return self._manager.world

    @property
    def sync(self) -> Sync:
        """Return how workers synchronize now."""
        return self._state.sync

    @property
    def provisional(self) -> bool:
        """Return True while this group trains without a quorum, so that its commits may be discarded."""
        return self._manager.provisional

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loader: DataLoader[Any],
        *more: Any,
        device_placement: bool = True,
    ) -> tuple[Any, ...]:
        """Return the same objects, wrapped for the session, in the same order.

        Schedulers and a GradScaler may follow the loader. With ``device_placement``, a model on the CPU is
        moved to `device`, and micro-batches are moved to the model's device.
        """
        if self._model is not None or self._split is not None:
            raise RunError("prepare was called twice", hint="Create everything first, then call it once.")
        scalers = [thing for thing in more if isinstance(thing, torch.amp.GradScaler)]
        schedulers = [thing for thing in more if thing not in scalers]
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        check_prepared(model, optimizers, schedulers)
        if device_placement:
            self._batch_device = place_model(model, optimizers, self.device)
        elif warning := unused_device(model, self.device):
            log.warning(warning)
        self._model, self._optimizers = model, optimizers
        self._reducer = GradientReducer(
            parameter for each_optimizer in optimizers for parameter in parameters_of(each_optimizer)
        )
        self._batch_norms = BatchNormStats(model)
        self._buffer_check = BufferMutationCheck(model, self._batch_norms.buffers)
        scaler = ScalerAdapter(scalers[0] if scalers else None)
        if scaler.scaler is not None:
            self._tracked[_SCALER] = scaler.scaler
        self._state = self._make_state(model, schedulers)
        unit = self._unit_size or max(1, (loader.batch_size or 1) // 8)
        self._data = self._make_loader(loader, unit)
        if (worker := WorkerId.from_environment()) is not None:
            install_failure_notice(worker)
        self._oom_guard.install(unit)
        # With ``mixed``, no two workers count as bitwise equal.
        arithmetic = os.urandom(8) if self._mixed else arithmetic_of(self._optimizers)
        optimizer_steps = [each_optimizer.step for each_optimizer in self._optimizers]
        context = StepContext(
            data=self._data,
            reducer=self._reducer,
            local_sgd=LocalSgd(self._reducer, self._state, optimizer_steps),
            batch_norms=self._batch_norms,
            state=self._state,
            scaler=scaler,
            bitwise_sync=BitwiseSync(self._state, arithmetic),
            optimizer_steps=optimizer_steps,
            scheduler_steps=[scheduler.step for scheduler in schedulers],
        )
        for each_optimizer in self._optimizers:
            each_optimizer.step = self._wrap_step(each_optimizer)  # type: ignore[method-assign,assignment]
        for scheduler in schedulers:
            scheduler.step = self._wrap_scheduler_step(type(scheduler).__name__)
        self._step_loop = self._make_step_loop(context)
        self._step_loop.clip = self._clip
        self._mapper.attach(self._step_loop)
        parts = self._manager, self._step_loop, self._metrics, self._throughput
        self._recorder = RunRecorder(lambda: open_sink(worker), *parts, self._data.batch)
        if not isinstance(self._data, LeasedData):
            self._configure_sync(scaler, loader.batch_size or 1, unit)
        self._step_loop.on_commit.append(self._manager.report_trained)
        self.on_commit(ProvisionalSteps.of(worker))
        if worker is not None:
            self._step_loop.on_commit.append(ProgressReporter(worker, self, self._data.batch))
        self._recorder.total_steps = lambda: self.total_steps
        self._recorder.attach(self._checkpoints)
        atexit.register(self._manager.close)
        atexit.register(self._step_loop.close)
        self._step_loop.join_next_group()
        if isinstance(self._step_loop, HubStepLoop):
            self._step_loop.wait_for_lease()
        return (model, optimizer, profiled(self, Batches(self)), *more)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the remaining epochs; a worker that joins late starts with the current one."""
        self._epochs = count
        for epoch in range(self._state.epoch if self._split is None else self._split.epoch, count):
            self.next_epoch = epoch
            yield epoch

    def every(self, steps: int) -> bool:
        """Return True after every ``steps``-th step, on all workers after the same one.

        Call it in the loop over the batches, after the loop over the micro-batches, or in `on_commit`.
        """
        if self._current is not None:
            raise RunError(
                "run.every was called before the step was finished",
                hint="Call it after the inner loop: a step has several micro-batches.",
            )
        first, last = (self._split is None and self._step_loop.commit_range) or (self.step - 1, self.step)
        return last // steps > max(0, first) // steps

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip the gradient of each whole batch to this norm from now on."""
        self._clip = max_norm
        if self._split is not None:
            self._split.loop.clip = max_norm
        if self._model is not None:
            self._step_loop.clip = max_norm

    def weight(self, amount: float) -> None:
        """Set the weight of the current micro-batch, for losses that are means over tokens, for example."""
        self._refuse_if_split("run.weight", "Give the weight of a micro-batch to run.split(..., weight=...).")
        if self._reducer.has_sent_gradients:
            raise RunError(
                "run.weight was called after backward()",
                hint="Call it before backward(), which already sends gradients.",
            )
        self._weight = float(amount)
        self._reducer.set_weight(self._weight)

    def log(self, **values: Any) -> None:
        """Log values, to be averaged over the whole batch. They are in `history` one commit later."""
        self._metrics.log(values)

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print on the main worker only, so that each line appears once."""
        if self.is_main:
            print(*values, sep=sep, end=end, flush=True)  # noqa: T201  # the script's own output

    def track(self, name: str, thing: Any) -> None:
        """Add an object with ``state_dict`` and ``load_state_dict`` to the training state."""
        self._refuse_if_split("run.track")
        self._tracked[name] = thing

    def save(self, path: str | Path, *, complete: bool = False) -> None:
        """Write the model's parameters and buffers as safetensors, once on every machine.

        A PEFT model is written as an adapter folder, unless the path ends in ``.safetensors``. Of another
        model with frozen parameters, only the training state is written. ``complete``: write the whole model
        into one file. What is written is there even if a machine dies while writing.
        """
        self._checkpoints.wait_until_written()
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if self._split is not None:
            self._split.save(Path(path), writes=is_first or self.is_main)
            return
        if self._model is None or not (is_first or self.is_main):
            return
        with self.committed():
            if is_adapter_folder(self._model, Path(path)) and not complete:
                save_adapter(self._model, Path(path), self.done)
                return
            tensors, base = self._state.saved_model(complete=complete)
            write_model(tensors, Path(path), {"steps": str(self.done), **base})

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Hold the model in its last committed state for the duration of the context."""
        if self._model is None:
            yield
            return
        with self._step_loop.committed(), self._batch_norms.committed():
            yield

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all workers, concatenated; scalars become a vector. For evaluation."""
        if self._split is not None:
            return self._split.gather(value)
        if self._current is not None:  # after a regroup the micro-batch may belong to another worker
            raise RunError("run.gather was called within a batch", hint="Call it after optimizer.step().")
        self._step_loop.wait_in_flight()
        own = encode_tensor(value if value.dim() else value.reshape(1))
        return torch.cat([decode_tensor(data) for data in self._manager.group.all_gather_bytes(own)])

    def map(self, function: Callable[[Any], Any], items: Any) -> list[Any]:
        """Return ``[function(item) for item in items]``; each item is computed once, by any of the workers.

        All workers call it with the same items and get all results: plain data, and tensors on the CPU.
        """
        self._refuse_if_split("run.map")
        if self._parameter_server is not None or self._is_site:
            raise RunError(
                "the members of a hub do not share the items of run.map",
                hint="Compute them in a script of their own, with `barnraise run`.",
            )
        if self._model is None:
            return self._mapper.map(function, items, 0)
        if self._current is not None or self._step_loop.commit_range is not None:
            raise RunError(
                "run.map was called within a step", hint="Call it after the inner loop, not in run.on_commit."
            )
        if self._state.sync.is_local and self._round_progress[1]:
            raise RunError(
                "run.map was called within a round of local steps, in which models differ",
                hint="Call it after the last batch of an epoch.",
            )
        self._step_loop.wait_in_flight()
        return self._mapper.map(function, items, self.step)

    def state_digest(self) -> str:
        """Hash everything that a commit may change."""
        self._refuse_if_split("run.state_digest")
        with self._batch_norms.committed():
            return self._step_loop.state_digest()

    def on_commit(self, callback: Callable[[Session], None]) -> None:
        """Call a function after every commit."""
        steps = self._step_loop if self._split is None else self._split.loop.record
        steps.on_commit.append(lambda: callback(self))

    # setup

    def _make_state(self, model: torch.nn.Module, schedulers: list[Any]) -> TrainingState:
        """Return the state of the training, and start to hash what is frozen of the model."""
        adapter, may_differ = describe_adapter(model), self._base_may_differ
        always = {*self._batch_norms.buffers, *ids_of_adapter(model, adapter)}
        base = FrozenBase(model, self._reducer.parameters, always, may_differ=may_differ)
        base.held, base.train_more = lambda: self._reducer.frozen, self._reducer.train_more
        base.start_hashing()
        base.log_statement()
        state = TrainingState(model, self._optimizers, schedulers, self._tracked, base)
        state.notes, state.adapter = self._notes, adapter
        return state

    def _make_loader(self, loader: DataLoader[Any], unit: int) -> MicroBatchLoader | IterableLoader:
        is_stream = isinstance(loader.dataset, IterableDataset)
        if self._parameter_server is not None or self._is_site:
            if is_stream:
                raise RunError(
                    "a hub leases positions of a dataset, which an iterable dataset does not have",
                    hint="Use a map-style dataset, with a length.",
                )
            # Batch norms normalize micro-batches, so with them the script decides how many there are.
            is_fine = self._is_site and not self._batch_norms.width
            return LeasedData(loader, unit, self._seed, is_fine=is_fine)
        return (
            IterableLoader(loader, unit, self._seed, self._state)
            if is_stream
            else MicroBatchLoader(loader, unit, self._seed)
        )

    def _make_step_loop(self, context: StepContext) -> StepLoop:
        parts = self._manager, self._checkpoints, context, self._metrics, self._throughput
        if not isinstance(self._data, LeasedData):
            return StepLoop(*parts)
        if context.scaler.scaler is not None:
            raise RunError(
                "a run with a hub does not support a GradScaler", hint="Use bfloat16 without a scaler."
            )
        client = GroupHubClient(self._parameter_server, self._reducer, self._data, self._state)
        self._tracked[_HUB] = client
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # earlier members have stepped: no warning
        return HubStepLoop(client, *parts)

    def _configure_sync(self, scaler: ScalerAdapter, batch: int, unit: int) -> None:
        """Set the synchronization that the script has asked for, or start the tuner."""
        sync = self._sync
        if isinstance(sync, Sync):
            if sync.is_local and scaler.scaler is not None:
                raise RunError(
                    "local steps do not work with a GradScaler, whose scale all workers must share",
                    hint="Use bfloat16 without a scaler, or synchronize every step.",
                )
            self._step_loop.requested_sync = sync
            return
        mode: SyncMode = "exact" if scaler.scaler is not None else sync
        trained = self._reducer.parameters
        parameters = sum(parameter.numel() for parameter in trained)
        sent_bytes = sum(parameter.numel() * max(4, parameter.element_size()) for parameter in trained)
        total = sum(parameter.numel() for parameter in self._state.model.parameters())
        tuner = SyncTuner(
            self._manager.survey,
            ModelSize(
                parameters=parameters, wire_bytes=sent_bytes / parameters, is_lora=parameters < total / 2
            ),
            StepTimes(batch=batch, unit=min(unit, batch)),
            mode,
            self._step_loop.request_sync,
            self._manager.request_pause,
            overlaps=self._step_loop.overlaps,
            levels=self._levels,
        )
        tuner.on_plan = self._recorder.note_plan
        observer = GroupObserver(tuner, self._manager, self._throughput, self._state)
        self._step_loop.on_commit.append(observer)

    # the loop

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield a batch for each step of an epoch that is left."""
        loop = self._step_loop
        self._mapper.start_epoch()
        if epoch > self._state.epoch and not self._data.is_over(epoch, self.done):
            self._state.epoch, self._state.epoch_start = epoch, self.done
            loop.start_epoch()
        while not self._data.is_over(epoch, self.done):
            if loop.exchange_if_due():
                continue
            batch = Batch(self, epoch, self.step + 1)
            self._in_batch = True
            try:
                yield batch
            finally:
                self._in_batch = False
            batch.check_finished()

    def microbatches(self, epoch: int, target: int) -> Iterator[Any]:
        """Yield this worker's micro-batches until step ``target`` is finished.

        A round of local steps is left in as many portions as it has steps: only the last one commits.
        """
        loop = self._step_loop
        self._mapper.follow_if_due()
        while not self._data.is_over(epoch, self.done) and not loop.has_reached(target):
            if not loop.pending:  # the other workers compute this step without us
                loop.finish_step()
                continue
            (step, covered), assigned = loop.position, self._assigned_parts()
            self._throughput.start_microbatch()  # loading data counts as this machine's work
            with self._throughput.phases.measure("data"):
                part, batch = assigned.next()
            self._start_microbatch(step, covered, part)
            try:
                yield move_batch(batch, self._batch_device)
            except GeneratorExit:  # break, return or an error: the script has left the loop
                self._discard_microbatch()
                raise
            self._check_stepped()
            self._throughput.finish_microbatch(part.span.size)
        covered = loop.round_start
        self._round_progress = (covered, max(0, target - covered) if loop.has_reached(target) else 0)

    def _assigned_parts(self) -> AssignedParts:
        """Return the parts that are left of this worker's micro-batches, or of those in a new assignment."""
        loop = self._step_loop
        key = (*loop.position, loop.assignment_epoch)
        if self._assigned is None or self._assigned.key != key or not self._assigned.is_left:
            parts = [part for unit in loop.pending for part in self._oom_guard.split(unit)]
            parts = parts[self._parts_done :]
            batches = self._data.batches(key[1], [part.span for part in parts])
            self._assigned = AssignedParts(key, parts, batches)
        return self._assigned

    def _start_microbatch(self, step: int, covered: int, part: MicroBatchPart) -> None:
        size = float(part.span.size)
        self._current, self._weight = part, None
        self._stepped.clear()
        self._metrics.start_microbatch(step, size)
        self._batch_norms.start_microbatch(part.part)
        self._data.seed_microbatch(covered, part.unit, part.part)
        self._reducer.discard_microbatch()
        self._buffer_check.start()
        loop = self._step_loop
        if len(loop.pending) == 1 and part.is_last and loop.sends_during_backward:
            self._reducer.start_last_microbatch(self._manager.group, size)

    def _discard_microbatch(self) -> None:
        """Restore the committed model: the current micro-batch does not count and is computed again."""
        self._batch_norms.finish_microbatch(None)
        self._reducer.discard_microbatch()
        self._reducer.clear_grads()
        self._current, self._assigned = None, None

    def _check_stepped(self) -> None:
        if self._current is not None:
            missing = len(self._optimizers) - len(self._stepped)
            each = f" of {missing} of the optimizers" if self._stepped else ""
            raise RunError(
                f"a micro-batch ended without optimizer.step(){each}",
                hint=f"{TWO_LOOPS} Call step() of each optimizer in the inner loop; it takes effect when the "
                "batch is complete.",
            )

    def _wrap_step(self, optimizer: Optimizer) -> Callable[..., None]:
        """Return the function that replaces ``optimizer.step``."""

        def step(closure: Any = None) -> None:
            if closure is not None:
                raise RunError(
                    "optimizer.step() was called with a closure, which would compute the batch again",
                    hint="Call backward() before it, and step() without a closure.",
                )
            if self._current is None:
                raise RunError("optimizer.step() was called without a batch", hint="Call it inside the loop.")
            if any(stepped is optimizer for stepped in self._stepped):
                raise RunError(
                    f"{type(optimizer).__name__}.step() was called twice for a batch",
                    hint="Call each optimizer's step() once for each batch: all take effect together.",
                )
            self._stepped.append(optimizer)
            if len(self._stepped) < len(self._optimizers):
                self._reducer.save_gradients(parameters_of(optimizer))
            else:
                self._finish_microbatch(self._current)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else torch warns about our wrapper
        return step

    def _wrap_scheduler_step(self, name: str) -> Callable[..., None]:
        """Return a no-op for ``scheduler.step``: schedulers follow commits, also of other workers."""

        def step(*_: Any) -> None:
            if not self._in_batch:
                raise RunError(
                    f"{name}.step() was called outside the loop over batches",
                    hint="A scheduler given to prepare moves with every commit. For one that moves with "
                    "epochs call run.track('scheduler', scheduler) instead, before prepare.",
                )

        return step

    def _finish_microbatch(self, part: MicroBatchPart) -> None:
        """Accumulate the micro-batch's gradients, and finish the step after the last micro-batch."""
        weight = self._weight if self._weight is not None else float(part.span.size)
        self._step_loop.add_microbatch(part.unit, weight, is_whole=part.is_last)
        check_all_taken(self._state.model, self._optimizers)
        self._buffer_check.finish()
        self._current, self._parts_done = None, 0 if part.is_last else part.part + 1
        self._throughput.finish_backward(self._reducer.pop_sending_s())
        if part.is_last and self._step_loop.is_due:  # a regroup must not split a micro-batch
            start = time.perf_counter()
            self._step_loop.finish_step()
            self._throughput.add_wait(time.perf_counter() - start)
