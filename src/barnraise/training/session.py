"""The session: an ordinary training loop whose steps are exact, whoever computes them and whoever dies.

``batches`` yields units. ``optimizer.step()`` after a unit adds its gradients to the step's sum; after the
last unit that this member has, the step is finished with all the others: see `steps`.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from barnraise.checkpoint.files import write_model
from barnraise.core.errors import RunError
from barnraise.planning import Levels, ModelSize, StepTimes
from barnraise.planning.inputs.levels import OPEN
from barnraise.training.autotune.profiler import profiled
from barnraise.training.autotune.tuner import GroupSample, SyncTuner, Wish
from barnraise.training.data.iterable import IterableLoader
from barnraise.training.data.loader import MicroBatchLoader
from barnraise.training.gradients.batch_norm_stats import BatchNormStats
from barnraise.training.gradients.grad_scaler import ScalerAdapter
from barnraise.training.gradients.reducer import GradientReducer
from barnraise.training.group.gathered import decode_tensor, encode_tensor
from barnraise.training.group.manager import GroupManager, WorkerId
from barnraise.training.hub.group_client import GroupHubClient
from barnraise.training.hub.port import HubPort, LeasedData
from barnraise.training.hub.step_loop import HubStepLoop
from barnraise.training.local_sgd import LocalSgd
from barnraise.training.metrics import MetricsLog
from barnraise.training.recovery.live_recovery import RecoveryStats
from barnraise.training.recovery.out_of_memory import MicroBatchPart, OutOfMemoryGuard
from barnraise.training.state.bitwise_sync import BitwiseSync, arithmetic_of
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.state.names_in_state import tensors_of
from barnraise.training.state.training_state import TrainingState
from barnraise.training.steps.context import StepContext
from barnraise.training.steps.provisional import ProvisionalSteps
from barnraise.training.steps.step_loop import StepLoop
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync
from barnraise.training.validation.buffer_mutation import BufferMutationCheck
from barnraise.training.validation.checks import check_all_taken, check_prepared, parameters_of

_SCALER = "barnraise.scaler"
_HUB = "barnraise.hub"


class Session:
    """Made by `barnraise.init`; `prepare` comes next."""

    def __init__(
        self,
        circle: GroupManager,
        *,
        seed: int,
        unit: int,
        saving: CheckpointManager,
        mixed: bool = False,
        sync: Wish | Sync = "exact",
        levels: Levels = OPEN,
        beyond: HubPort | None = None,
        is_site: bool = False,
    ) -> None:
        """``is_site``: the group is one member of a hub, and ``beyond`` the way there, if there is one."""
        self.next_epoch = 0  # of the next pass over the batches
        self._circle = circle
        self._saving = saving
        self._seed = seed
        self._unit_size = unit
        self._mixed = mixed
        self._sync, self._levels = sync, levels
        self._beyond, self._is_site = beyond, is_site
        self._model: torch.nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._tracked: dict[str, Any] = {}
        self._clip: float | None = None
        self._current: MicroBatchPart | None = None
        self._stepped: list[Optimizer] = []  # in the unit at hand
        self._parts_taken = 0  # of a unit in parts that the script is in the midst of
        self._weight: float | None = None
        self._in_batch = False
        self._pace = Throughput()
        self._memory = OutOfMemoryGuard.from_environment()
        self._journal = MetricsLog()

    # what the script asks

    @property
    def done(self) -> int:
        """Steps, which is batches of the loader, that are committed."""
        return self._state.covered

    @property
    def healed(self) -> RecoveryStats | None:
        """How this member got the state, if it came while the others trained."""
        return self._steps.healed

    @property
    def is_main(self) -> bool:
        """Whether this member speaks for all: exactly one does at any time."""
        return self._circle.rank == 0

    @property
    def history(self) -> list[dict[str, float]]:
        """What was logged, by step: means over whole batches. Of long runs the beginning is forgotten."""
        return self._journal.history

    @property
    def world(self) -> int:
        return self._circle.world

    @property
    def sync(self) -> Sync:
        """How the members stay together now."""
        return self._state.sync

    @property
    def provisional(self) -> bool:
        """Whether this side goes on without a quorum, so that its commits may be given up later."""
        return self._circle.provisional

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loader: DataLoader[Any],
        *more: Any,
    ) -> tuple[Any, ...]:
        """What to use from now on, in the same order; schedulers and a GradScaler may follow the loader."""
        if self._model is not None:
            raise RunError("prepare was called twice", hint="Make everything first, then call it once.")
        scalers = [one for one in more if isinstance(one, torch.amp.GradScaler)]
        schedulers = [one for one in more if one not in scalers]
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        check_prepared(model, optimizers, schedulers)
        self._model, self._optimizers = model, optimizers
        self._sums = GradientReducer(parameter for one in optimizers for parameter in parameters_of(one))
        self._norms = BatchNormStats(model)
        self._written = BufferMutationCheck(model, self._norms.buffers)
        scaling = ScalerAdapter(scalers[0] if scalers else None)
        if scaling.scaler is not None:
            self._tracked[_SCALER] = scaling.scaler
        self._state = TrainingState(model, self._optimizers, schedulers, self._tracked)
        unit = self._unit_size or max(1, (loader.batch_size or 1) // 8)
        self._data = self._data_of(loader, unit)
        self._memory.watch(unit)
        # With ``mixed`` no two members are taken for alike.
        arithmetic = os.urandom(8) if self._mixed else arithmetic_of(self._optimizers)
        optimizer_steps = [one.step for one in self._optimizers]
        training = StepContext(
            data=self._data,
            sums=self._sums,
            rounds=LocalSgd(self._sums, self._state, optimizer_steps),
            norms=self._norms,
            state=self._state,
            scaling=scaling,
            anchoring=BitwiseSync(self._state, arithmetic),
            optimizer_steps=optimizer_steps,
            scheduler_steps=[one.step for one in schedulers],
        )
        for one in self._optimizers:
            one.step = self._step_of(one)  # type: ignore[method-assign,assignment]
        for scheduler in schedulers:
            scheduler.step = self._scheduler_step_of(type(scheduler).__name__)
        self._steps = self._steps_of(training)
        self._steps.clip = self._clip
        if not isinstance(self._data, LeasedData):
            self._choose_sync(scaling, loader.batch_size or 1, unit)
        self._steps.on_commit.append(self._circle.say_trained)
        self.on_commit(ProvisionalSteps.of(WorkerId.from_environment()))
        atexit.register(self._circle.close)
        atexit.register(self._steps.close)
        self._steps.meet()
        if isinstance(self._steps, HubStepLoop):
            self._steps.begin()
        return (model, optimizer, profiled(self, Batches(self)), *more)

    def _data_of(self, loader: DataLoader[Any], unit: int) -> MicroBatchLoader | IterableLoader:
        is_stream = isinstance(loader.dataset, IterableDataset)
        if self._beyond is not None or self._is_site:
            if is_stream:
                raise RunError(
                    "a hub leases places in an order, and a stream has none",
                    hint="Use a data set with a length, which can be read at any place.",
                )
            # Batch norms normalise units, so with them there are as many as the script wants.
            return LeasedData(loader, unit, self._seed, is_fine=self._is_site and not self._norms.width)
        return (
            IterableLoader(loader, unit, self._seed, self._state)
            if is_stream
            else MicroBatchLoader(loader, unit, self._seed)
        )

    def _steps_of(self, training: StepContext) -> StepLoop:
        parts = self._circle, self._saving, training, self._journal, self._pace
        if not isinstance(self._data, LeasedData):
            return StepLoop(*parts)
        if training.scaling.scaler is not None:
            raise RunError("a hub's run has no GradScaler", hint="Use bfloat16 without a scaler.")
        outward = GroupHubClient(self._beyond, self._sums, self._data, self._state)
        self._tracked[_HUB] = outward
        for one in self._optimizers:
            one._opt_called = True  # type: ignore[attr-defined]  # by those who trained before us, as schedulers see it
        return HubStepLoop(outward, *parts)

    def _choose_sync(self, scaling: ScalerAdapter, batch: int, unit: int) -> None:
        sync = self._sync
        if isinstance(sync, Sync):
            if sync.is_local and scaling.scaler is not None:
                raise RunError(
                    "local steps do not work with a GradScaler, whose scale all members must share",
                    hint="Use bfloat16 without a scaler, or synchronise every step.",
                )
            self._steps.wanted = sync
            return
        wish: Wish = "exact" if scaling.scaler is not None else sync
        trained = self._sums.parameters
        parameters = sum(one.numel() for one in trained)
        wire = sum(one.numel() * max(4, one.element_size()) for one in trained) / parameters
        is_lora = parameters < sum(one.numel() for one in self._state.model.parameters()) / 2
        chooser = SyncTuner(
            self._circle.survey,
            ModelSize(parameters=parameters, wire_bytes=wire, is_lora=is_lora),
            StepTimes(batch=batch, unit=min(unit, batch)),
            wish,
            self._steps.want,
            self._circle.say_rests,
            overlaps=self._steps.overlaps,
            levels=self._levels,
        )
        last = [time.monotonic(), 0.0]

        def note() -> None:
            now, covered = time.monotonic(), self.done
            step_s = (now - last[0]) / max(1.0, covered - last[1])
            last[:] = [now, covered]
            if self.is_main:
                speeds = tuple(self._pace.shares) if self._pace.is_known else ()
                seen = GroupSample(
                    self._circle.generation, self._state.sync, speeds, self._circle.machines(), step_s
                )
                chooser.note(seen)

        self._steps.on_commit.append(note)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left: a member that joins late begins with the one that the others are in."""
        for epoch in range(self._state.epoch, count):
            self.next_epoch = epoch
            yield epoch

    def clip_grad_norm(self, most: float) -> None:
        """From now on the gradient of each whole batch is clipped to this norm."""
        self._clip = most
        if self._model is not None:
            self._steps.clip = most

    def weight(self, amount: float) -> None:
        """Of the unit at hand: for losses that are means over something else than samples, such as tokens."""
        if self._sums.has_begun:
            raise RunError(
                "run.weight was called after backward()",
                hint="Call it before: gradients travel while backward still runs.",
            )
        self._weight = float(amount)
        self._sums.weigh(self._weight)

    def log(self, **values: Any) -> None:
        """Means over the whole batch; in `history` one commit later, as it is often called after the step."""
        self._journal.log(values)

    def track(self, name: str, thing: Any) -> None:
        """Something with ``state_dict`` and ``load_state_dict`` that belongs to the state."""
        self._tracked[name] = thing

    def save(self, path: str | Path) -> None:
        """The model's parameters and buffers as safetensors; written on every machine, by its first worker.

        So it is there at the end of the run, whoever dies while it is written.
        """
        self._saving.finish()
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if self._model is None or not (is_first or self.is_main):
            return
        with self._steps.committed(), self._norms.committed():
            write_model(tensors_of(self._model), Path(path), {"steps": str(self.done)})

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Every member's tensor, one after the other; of numbers, a row of them. For evaluation."""
        if self._current is not None:  # the unit at hand may be another one's when the group has met anew
            raise RunError("run.gather was called within a batch", hint="Call it after optimizer.step().")
        self._steps.settle()
        said = encode_tensor(value if value.dim() else value.reshape(1))
        return torch.cat([decode_tensor(data) for data in self._circle.gather(said)])

    def state_digest(self) -> str:
        """Of everything that a commit may change."""
        with self._norms.committed():
            return self._steps.state_digest()

    def on_commit(self, notice: Callable[[Session], None]) -> None:
        self._steps.on_commit.append(lambda: notice(self))

    # the loop

    def units_of(self, epoch: int) -> Iterator[Any]:
        """Batches of this member's units, until the steps of an epoch are committed."""
        if epoch > self._state.epoch and not self._data.is_over(epoch, self.done):
            self._state.epoch, self._state.epoch_began = epoch, self.done
            self._steps.begin_epoch()
        while not self._data.is_over(epoch, self.done):
            if not self._steps.pending:  # the others have enough to do without us
                self._steps.finish()
                continue
            (step, covered), deals = self._steps.at, self._steps.deals
            pieces = [one for unit in self._steps.pending for one in self._memory.pieces(unit)]
            pieces = pieces[self._parts_taken :]
            batches = self._data.batches(covered, [piece.span for piece in pieces])
            for piece in pieces:
                self._pace.begin_unit()  # to wait for data is work of this machine
                batch = next(batches)
                self._begin(step, covered, piece)
                self._in_batch = True
                try:
                    yield batch
                except GeneratorExit:  # break, return or an error: the script is out of the loop
                    self._leave_unit()
                    raise
                self._in_batch = False
                self._check_stepped()
                self._pace.end_unit(piece.span.size)
                if self._steps.deals != deals:
                    break  # a group has changed while a sum was on its way

    def _begin(self, step: int, covered: int, piece: MicroBatchPart) -> None:
        size = float(piece.span.size)
        self._current, self._weight = piece, None
        self._stepped.clear()
        self._journal.begin_unit(step, size)
        self._norms.begin(piece.part)
        self._data.seed_unit(covered, piece.unit, piece.part)
        self._sums.forget_unit()
        self._written.begin()
        if len(self._steps.pending) == 1 and piece.is_last and self._steps.travels_early:
            self._sums.expect_last(self._circle, size)

    def _leave_unit(self) -> None:
        """The unit at hand does not count: the model is what was committed; another pass begins with it."""
        self._norms.end(None)
        self._sums.forget_unit()
        self._sums.release()
        self._current, self._in_batch = None, False

    def _check_stepped(self) -> None:
        if self._current is not None:
            missing = len(self._optimizers) - len(self._stepped)
            each = f" of {missing} of the optimizers" if self._stepped else ""
            raise RunError(
                f"a batch ended without optimizer.step(){each}",
                hint="Call step() of each optimizer for each batch; it takes effect with the last one.",
            )

    def _step_of(self, optimizer: Optimizer) -> Callable[..., None]:
        def step(closure: Any = None) -> None:
            if closure is not None:
                raise RunError(
                    "optimizer.step() was called with a closure, which would compute the unit again",
                    hint="Call backward() before it, and step() without one.",
                )
            if self._current is None:
                raise RunError("optimizer.step() was called without a batch", hint="Call it inside the loop.")
            if any(one is optimizer for one in self._stepped):
                raise RunError(
                    f"{type(optimizer).__name__}.step() was called twice for a batch",
                    hint="Call each optimizer's step() once for each batch: all take effect together.",
                )
            self._stepped.append(optimizer)
            if len(self._stepped) < len(self._optimizers):
                self._sums.put_by(parameters_of(optimizer))
            else:
                self._unit_done(self._current)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else torch warns, for our own wrapper
        return step

    def _scheduler_step_of(self, name: str) -> Callable[..., None]:
        """In the loop it does nothing: schedulers follow commits, also those without a batch of ours."""

        def step(*_: Any) -> None:
            if not self._in_batch:
                raise RunError(
                    f"{name}.step() was called outside the loop over batches",
                    hint="A scheduler given to prepare moves with every commit. For one that moves with "
                    "epochs call run.track('scheduler', scheduler) instead, before prepare.",
                )

        return step

    def _unit_done(self, piece: MicroBatchPart) -> None:
        weight = self._weight if self._weight is not None else float(piece.span.size)
        self._steps.claim(piece.unit, weight, is_whole=piece.is_last)
        check_all_taken(self._state.model, self._optimizers)
        self._written.end()
        self._current, self._parts_taken = None, 0 if piece.is_last else piece.part + 1
        self._pace.waited(self._sums.sending_s())
        if piece.is_last and self._steps.is_due:  # a group that changes finds whole units alone
            begin = time.monotonic()
            self._steps.finish()
            self._pace.waited(time.monotonic() - begin)


class Batches:
    """Each pass over it is the next epoch; one that the others have finished is empty."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __len__(self) -> int:
        """Steps, not units; TypeError for a stream."""
        return len(self._session._data)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._session.next_epoch
        self._session.next_epoch += 1
        yield from self._session.units_of(epoch)
