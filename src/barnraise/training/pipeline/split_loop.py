"""Step loop of one worker that holds a stage of a split model.

A step runs through the pipeline. Then each worker sends the gradients of its trained parameters to the next
one, which mirrors them, and all vote. When all have voted, all apply the step: that is a commit.

If the group fails, the workers regroup and place the blocks again. Trained state comes from a worker that has
it, and the frozen base from the model's files. A step that no worker has applied is repeated.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3
from torch import nn

from barnraise.checkpoint.serialization import FlatState, flatten, shapes, tensor_bytes, unflatten
from barnraise.core.decoding import decode
from barnraise.core.errors import CollectiveError, ProtocolError, RunError
from barnraise.planning.plan.stage_placement import ModelParts, StageMachine, StagePlacement, place_stages
from barnraise.training.data.loader import MicroBatchLoader
from barnraise.training.device_placement import move_batch
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.holdings import (
    MemberHoldings,
    RegroupDecision,
    StageVote,
    Transfer,
    decide_regroup,
    mirrored_rank,
    plan_transfers,
    units_of,
)
from barnraise.training.pipeline.machine_memory import usable_memory, used_memory
from barnraise.training.pipeline.outline import LossFunction, ModelOutline
from barnraise.training.pipeline.passes.activations import ActivationCodec
from barnraise.training.pipeline.passes.order import Order
from barnraise.training.pipeline.passes.schedule import MicroBatchWork, run_alone, run_stage
from barnraise.training.pipeline.split_checkpoint import SplitCheckpoint
from barnraise.training.pipeline.stage import Stage
from barnraise.training.pipeline.trained_state import (
    OptimizerFactory,
    ParameterStates,
    SchedulerFactory,
    TrainedState,
)
from barnraise.training.pipeline.weights import StageWeights
from barnraise.training.record.split_record import SplitRecord
from barnraise.training.recovery.failures import exit_without_state, raise_if_permanent
from barnraise.training.state.adapter import describe_adapter
from barnraise.training.state.checkpoint_manager import CheckpointManager

log = logging.getLogger("barnraise.training")

_UNREADABLE = "a message of another worker about a split model cannot be read"
_POLL_S = 0.5
_SHARE = 0.9  # of a machine's memory that is planned with

_votes = msgspec.msgpack.Decoder(StageVote)
_holdings = msgspec.msgpack.Decoder(MemberHoldings)
_skeletons = msgspec.msgpack.Decoder(list[bytes])


class SplitTask(NamedTuple):
    """Model to be trained, and how. ``weigh``: returns the weight of a micro-batch, such as its tokens."""

    model: nn.Module
    outline: ModelOutline
    parts: ModelParts
    loss: LossFunction
    weigh: Callable[[Any], float]
    make_optimizer: OptimizerFactory
    make_scheduler: SchedulerFactory | None
    order: Order
    codec: ActivationCodec


class SplitLoop:
    """Drives the steps of one worker. ``done``: steps that are applied. ``loss``: of the newest one."""

    def __init__(
        self,
        manager: GroupManager,
        task: SplitTask,
        weights: StageWeights,
        data: MicroBatchLoader,
        device: torch.device,
        checkpoints: CheckpointManager,
        record: SplitRecord,
    ) -> None:
        self.done, self.loss, self.factor = 0, 0.0, 1.0
        self.clip: float | None = None
        self.record = record
        self.runs: tuple[tuple[int, int], ...] = ()  # of blocks, by rank
        self._manager, self._task, self._weights, self._data = manager, task, weights, data
        self._device, self._checkpoints = device, checkpoints
        self.adapter = describe_adapter(task.model)  # while the model has all its parts
        self._saved = SplitCheckpoint(self.adapter)
        self._count = len(task.outline.blocks)
        self._trained = {
            name: parameter for name, parameter in task.model.named_parameters() if parameter.requires_grad
        }
        parameters = task.model.named_parameters()
        forms = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in parameters)
        self._model_hash = blake3(repr((forms, task.order, task.codec)).encode()).digest()
        self._stage: Stage | None = None
        self._own: TrainedState | None = None
        self._mirror: TrainedState | None = None
        self._own_run: tuple[int, int] | None = None
        self._mirrored_run: tuple[int, int] | None = None
        self._is_ready = False
        self._work: tuple[int, list[MicroBatchWork]] = (-1, [])
        self._shapes: dict[object, tuple[int, ...]] = {}
        self._block_s = 0.0
        self._memory_bytes = 0
        self._base_bytes = 0  # of programs, before any weights are loaded

    # steps

    def reach(self, target: int) -> float:
        """Train until this many steps are applied. Return the loss of the newest one."""
        while self.done < target:
            try:
                self._train_step()
            except CollectiveError as error:
                raise_if_permanent(error)
                self.join_next_group(error)
        return self.loss

    def _train_step(self) -> None:
        stage, own = self._stage, self._own
        assert stage is not None
        assert own is not None
        own.clear_gradients()
        phases = self.record.phases
        with phases.measure("data"):
            work = self._load_work()
        stage.busy_s = 0.0
        with self.record.passes(stage):
            if self._manager.world == 1:
                loss = run_alone(stage, work, self._seed)
            else:
                loss = run_stage(stage, work, self._task.codec, self._seed, self._task.order)
        self._block_s = stage.busy_s / (len(work) * (stage.end - stage.first)) if work else 0.0
        with phases.measure("communication"):
            self._exchange_gradients()
        with phases.measure("vote"):
            votes = self._vote(loss)
        norm = math.sqrt(math.fsum(vote.squared_norm for vote in votes))
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip is not None else 1.0
        self._commit(math.fsum(vote.loss for vote in votes), factor, votes)
        if votes[0].checkpoint_due:
            self.record.before_checkpoint()
            with phases.measure("checkpoint"):
                self._save([rank for rank, vote in enumerate(votes) if vote.can_save])
        if max(vote.newest_generation for vote in votes) > self._manager.generation:
            self.join_next_group(None)

    def _load_work(self) -> list[MicroBatchWork]:
        """Return the micro-batches of the current step, which every stage loads."""
        if self._work[0] == self.done:
            return self._work[1]
        stage = self._stage
        assert stage is not None
        units = self._data.microbatches(self.done)
        inputs = [move_batch(batch, self._device) for batch in self._data.batches(self.done, units)]
        weights = [float(self._task.weigh(each)) for each in inputs]
        total = math.fsum(weights)
        work = [
            MicroBatchWork(unit.number, each, weight / total, self._shape_of(stage, each))
            for unit, each, weight in zip(units, inputs, weights, strict=True)
            if weight > 0  # the mean over no tokens is no number
        ]
        if not work:
            raise RunError(
                f"no sample of step {self.done + 1} has a weight",
                hint="Every batch needs labels to learn from.",
            )
        self._work = (self.done, work)
        return work

    def _shape_of(self, stage: Stage, inputs: Any) -> tuple[int, ...]:
        leaves = torch.utils._pytree.tree_leaves(inputs)
        key = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if key not in self._shapes:
            self._shapes[key] = stage.shape_of(inputs)
        return self._shapes[key]

    def _seed(self, number: int, block: int) -> None:
        """Seed by the sample's place and the block, so that no random number depends on the split."""
        unit = self._data.microbatches(self.done)[number]
        self._data.seed_microbatch(self.done, unit, block + 2)

    def _exchange_gradients(self) -> None:
        """Send the gradients of this stage to the next worker, and receive those that this one mirrors."""
        manager, own, mirror = self._manager, self._own, self._mirror
        if mirror is None or own is None:
            return
        group, world = manager.group, manager.world
        received = torch.empty(mirror.gradient_bytes, dtype=torch.uint8)
        works = []
        if own.gradient_bytes:
            works.append(group.send_async(own.pack_gradients(), (manager.rank + 1) % world))
        if mirror.gradient_bytes:
            works.append(group.receive_async(received, (manager.rank - 1) % world))
        for work in works:
            work.wait()
        mirror.unpack_gradients(received)

    def _vote(self, loss: float) -> list[StageVote]:
        own, manager = self._own, self._manager
        assert own is not None
        fingerprint = _fingerprint(self._work[1])
        vote = StageVote(
            self.done,
            loss,
            own.squared_norm(),
            manager.newest_generation(),
            fingerprint,
            self._checkpoints.is_due(),
            self._checkpoints.can_save and self._can_hold_all(),
            self.record.speed(manager.rank, self._samples()),
            self.record.logged(),
        )
        self._is_ready = True
        messages = manager.group.all_gather_bytes(msgspec.msgpack.encode(vote))
        votes = [decode(_votes, message, _UNREADABLE) for message in messages]
        if {each.step for each in votes} != {self.done}:
            raise RunError("workers of one group are at different steps", hint="Report this.")
        if len({each.fingerprint for each in votes}) > 1:
            raise RunError(
                f"the machines have different samples in step {self.done + 1}",
                hint="Every machine needs the same data set, in the same order.",
            )
        return votes

    def _samples(self) -> int:
        """Return the samples of the current step."""
        return sum(unit.size for unit in self._data.microbatches(self.done))

    def _commit(self, loss: float, factor: float, votes: Sequence[StageVote] = ()) -> None:
        """Apply the step: from here on it counts."""
        for state in (self._own, self._mirror):
            if state is not None:
                state.apply(factor)
        logged, speeds = [vote.logged for vote in votes], [vote.speed for vote in votes]
        self.record.commit(self._samples(), loss, logged, speeds)
        self.done += 1
        self.loss, self.factor, self._is_ready = loss, factor, False
        self.record.run_callbacks()

    # groups

    def join_next_group(self, error: CollectiveError | None) -> None:
        """Join groups until one holds in which each worker has the stage that it was given."""
        while True:
            if error is not None:
                log.info("the group failed at step %d: %s", self.done, error.message)
            self._manager.join_next_group(error)
            try:
                is_placed = self._regroup()
            except CollectiveError as failure:
                raise_if_permanent(failure)
                error = failure
                continue
            if is_placed:
                self._manager.report_waiting("")
                return
            error = None

    def _regroup(self) -> bool:
        """Take a stage in this group. Return False if the model does not fit on its machines for now."""
        manager = self._manager
        members = self._exchange_holdings()
        units = self._count + 2
        decision = decide_regroup(members, units)
        if not decision.holders and not manager.is_first_start:
            exit_without_state(finished=manager.finished)
        lost = [unit for unit in decision.lost if self._names_of_unit(unit)]
        if lost and decision.holders:
            log.error("%d parts of the model were on machines that were lost together", len(lost))
            exit_without_state(finished=False)
        is_behind = not members[manager.rank].is_fresh and self.done < decision.done
        if is_behind and decision.apply_factor is not None:
            self._commit(decision.loss, decision.apply_factor)
        self._is_ready = False
        if any(member.is_fresh for member in members) and not members[manager.rank].is_fresh:
            self.record.hand_over()
        if not decision.holders:
            decision = self._restore(decision)
        try:
            placement = self._place(members)
        except RunError as error:
            if not decision.holders:  # all machines of the run are here
                raise
            log.warning("waiting for another machine: %s", error.message)
            manager.report_waiting("another machine")
            # Without a time limit, because this worker may hold the only copy of what it has trained.
            while manager.newest_generation() <= manager.generation:
                time.sleep(_POLL_S)
            return False
        self._adopt(members, decision, placement)
        if manager.world > 1:
            manager.group.make_default()
        return True

    # checkpoints

    def _can_hold_all(self) -> bool:
        """Tell whether this worker has memory for the trained state of all stages."""
        trained = sum(value.numel() * value.element_size() for value in self._trained.values())
        return 4 * trained <= self._memory_bytes // 4

    def _save(self, savers: Sequence[int]) -> None:
        """Send the trained state of all stages to the workers that save it."""
        manager, holders = self._manager, savers[: self._checkpoints.copies]
        transfers = [
            Transfer(unit, rank, saver)
            for saver in holders
            for rank, run in enumerate(self.runs)
            if rank != saver
            for unit in units_of(run, self._count)
        ]
        received, schedule = self._transfer(transfers, 0)
        if manager.rank in holders:
            self._saved.states, self._saved.schedule = {**self._export_all(), **received}, schedule
        self._checkpoints.save(manager, savers, self._saved, self.done)
        self._saved.clear()

    def _restore(self, decision: RegroupDecision) -> RegroupDecision:
        """Load the newest checkpoint on one worker, which then holds all units; or start new."""
        rank, done = self._checkpoints.restore(self._manager, self._saved)
        if not done:
            return decision
        self.record.state_origin = "checkpoint"
        return decision._replace(done=done, holders=dict.fromkeys(range(self._count + 2), rank))

    def _exchange_holdings(self) -> list[MemberHoldings]:
        self._memory_bytes = self._memory()
        own = MemberHoldings(
            self.done,
            units_of(self._own_run, self._count) if self._own_run is not None else (),
            units_of(self._mirrored_run, self._count) if self._mirrored_run is not None else (),
            self._is_ready,
            self.factor,
            self.loss,
            self._memory_bytes,
            self._block_s,
            self._model_hash,
        )
        messages = self._manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
        return [decode(_holdings, message, _UNREADABLE) for message in messages]

    def _memory(self) -> int:
        """Return the memory for this worker's stage. Workers on the processors of one machine share it."""
        memory, machines = usable_memory(self._device), self._manager.machines()
        if self._device.type == "cpu":
            memory //= machines.count(machines[self._manager.rank])
        if self._stage is None:
            self._base_bytes = used_memory(self._device)
        # Computing takes more for a moment, such as a copy of a weight in another layout.
        return max(1, int(_SHARE * memory) - self._base_bytes)

    def _place(self, members: Sequence[MemberHoldings]) -> StagePlacement:
        manager = self._manager
        machines = [
            StageMachine(manager.name_of(rank), member.memory_bytes, member.block_s)
            for rank, member in enumerate(members)
        ]
        placement = place_stages(self._task.parts, machines, len(self._data.microbatches(0)))
        if manager.rank == 0:
            for line in placement.why:
                log.warning(line)
        return placement

    def _adopt(
        self, members: Sequence[MemberHoldings], decision: RegroupDecision, placement: StagePlacement
    ) -> None:
        """Take the stage and the mirror that the placement gives to this worker."""
        manager, runs = self._manager, placement.runs
        transfers = plan_transfers(members, runs, decision.holders, self._count)
        source = min(decision.holders.values(), default=0)
        received, schedule = self._transfer(transfers, source)
        self.record.count_moved(received)
        states = {**self._export_all(), **self._saved.states, **received}
        self._saved.clear()
        self._build(runs, manager.rank)
        if decision.holders:
            for state in (self._own, self._mirror):
                if state is not None:
                    state.load({name: states[name] for name in state.parameters})
                    state.load_schedule(schedule)
        self.done, self.loss, self.runs = decision.done, decision.loss, runs
        names = [manager.name_of(rank) for rank in range(manager.world)] if manager.rank == 0 else []
        self.record.place(self.done, runs, names, placement.why)
        if decision.apply_factor is not None:
            self.factor = decision.apply_factor

    def _build(self, runs: Sequence[tuple[int, int]], rank: int) -> None:
        """Load the weights of this worker's stage, and make its optimizer and its mirror."""
        task, outline = self._task, self._task.outline
        if self._stage is not None:
            self._stage.undo()
        first, end = self._own_run = runs[rank]
        names = outline.names(first, end)
        self._weights.drop_all_but(names)
        self._weights.load(names)
        self._stage = Stage(task.model, outline, first, end, task.loss)
        parameters = dict(task.model.named_parameters())
        own = {name: parameters[name] for name in names if name in self._trained}
        self._own = TrainedState(own, task.make_optimizer, task.make_scheduler)
        mirrored = mirrored_rank(rank, len(runs))
        self._mirror, self._mirrored_run = None, None
        if mirrored is not None:
            self._mirrored_run = runs[mirrored]
            copies = self._weights.copies(outline.names(*runs[mirrored]) & self._trained.keys())
            self._mirror = TrainedState(copies, task.make_optimizer, task.make_scheduler)

    def _names_of_unit(self, unit: int) -> list[str]:
        outline = self._task.outline
        parts = (outline.before, *outline.blocks, outline.after)
        return sorted(parts[unit] & self._trained.keys())

    def _export_all(self) -> ParameterStates:
        states: ParameterStates = {}
        for state in (self._mirror, self._own):
            if state is not None and state.parameters:
                states |= state.export(list(state.parameters))
        return states

    def _transfer(self, transfers: Sequence[Transfer], source: int) -> tuple[ParameterStates, dict[str, Any]]:
        """Send and receive trained state. Return it by name, and the schedule of the rank ``source``."""
        manager = self._manager
        held = {**self._export_all(), **self._saved.states}
        schedule = self._saved.schedule
        for state in (self._own, self._mirror):
            if state is not None:
                schedule = schedule or state.export_schedule()
        outgoing = [
            (each, flatten({name: held[name] for name in self._names_of_unit(each.unit)}))
            for each in transfers
            if each.sender == manager.rank
        ]
        own = [flatten(schedule).skeleton, *(parts.skeleton for _, parts in outgoing)]
        messages = manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
        skeletons = [decode(_skeletons, message, _UNREADABLE) for message in messages]
        works, arriving = [], []
        for each, parts in outgoing:
            works += [manager.group.send_async(value.contiguous(), each.receiver) for value in parts.tensors]
        for rank in range(manager.world):
            sent = [each for each in transfers if each.sender == rank]
            if len(sent) != len(skeletons[rank]) - 1:
                raise ProtocolError("a worker sends other parts of the model than those that were asked for")
            for each, skeleton in zip(sent, skeletons[rank][1:], strict=True):
                if each.receiver != manager.rank:
                    continue
                tensors = self._buffers(each.unit, skeleton)
                works += [manager.group.receive_async(tensor, rank) for tensor in tensors]
                arriving.append(FlatState(skeleton, tensors))
        for work in works:
            work.wait()
        received: ParameterStates = {}
        for parts in arriving:
            received |= unflatten(parts.skeleton, parts.tensors)
        return received, unflatten(skeletons[source][0], [])

    def _buffers(self, unit: int, skeleton: bytes) -> list[torch.Tensor]:
        """Return memory for a unit that another worker sends. Raise ProtocolError if it is too large."""
        forms = shapes(skeleton)
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in forms)
        own = sum(self._trained[name].numel() for name in self._names_of_unit(unit))
        if size > 8 * 8 * own + (1 << 20):  # no optimizer keeps more than seven values of eight bytes
            raise ProtocolError("another worker sends more trained state than the model has")
        return [torch.empty(shape, dtype=dtype) for dtype, shape in forms]

    def gather_trained(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters of all stages, on every worker."""
        own = self._own
        assert own is not None
        values = {name: parameter.detach().cpu() for name, parameter in own.parameters.items()}
        manager, everything = self._manager, dict(values)
        if manager.world == 1:
            return everything
        works = []
        for rank, run in enumerate(self.runs):
            names = sorted(self._task.outline.names(*run) & self._trained.keys())
            for name in names:
                if rank == manager.rank:
                    works += [
                        manager.group.send_async(values[name].contiguous(), to)
                        for to in range(manager.world)
                        if to != rank
                    ]
                else:
                    like = self._trained[name]
                    everything[name] = torch.empty(like.shape, dtype=like.dtype)
                    works.append(manager.group.receive_async(everything[name], rank))
        for work in works:
            work.wait()
        return everything


def _fingerprint(work: Sequence[MicroBatchWork]) -> bytes:
    """Return a hash of the samples of a step."""
    hasher = blake3()
    for each in work:
        hasher.update(repr((each.number, each.share)).encode())
        for leaf in torch.utils._pytree.tree_leaves(each.inputs):
            if isinstance(leaf, torch.Tensor):
                hasher.update(tensor_bytes(leaf.cpu()))
    return hasher.digest()
