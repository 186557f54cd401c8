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
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import torch

from barnraise.core.errors import CollectiveError, RunError
from barnraise.planning.split.mirror_placement import MirrorMember, MirrorPlacement, place_mirrors
from barnraise.planning.split.move_cost import HeldBlocks
from barnraise.planning.split.replica_placement import SplitPlacement, place_pipelines
from barnraise.planning.split.split_problem import SplitProblem
from barnraise.planning.split.stage_placement import mirror_bytes
from barnraise.training.data.loader import MicroBatchLoader
from barnraise.training.group.interface import GroupManager
from barnraise.training.pipeline.holdings import (
    MemberHoldings,
    RegroupDecision,
    Run,
    StageVote,
    blocks_of,
    decide_regroup,
    plan_transfers,
    units_of,
)
from barnraise.training.pipeline.machine_memory import free_memory
from barnraise.training.pipeline.members.gradient_exchange import add_replicas, send_to_mirrors
from barnraise.training.pipeline.members.handover import (
    ReportedGenerations,
    StayingMember,
    exchange_notices,
    is_confirmed,
    plan_handover,
)
from barnraise.training.pipeline.members.loaded_step import LoadedStep
from barnraise.training.pipeline.members.member_stage import KeptState, MemberStage, SplitTask
from barnraise.training.pipeline.members.operation_turns import NextOperation, OperationKind, choose_turn
from barnraise.training.pipeline.members.refusals import (
    check_votes,
    judge_holdings,
    names_of,
    read_reports,
    refuse,
)
from barnraise.training.pipeline.members.stage_checkpoint import RestoredState, StageCheckpoints
from barnraise.training.pipeline.members.state_exchange import StateExchange
from barnraise.training.pipeline.passes.schedule import run_alone, run_stage
from barnraise.training.pipeline.prediction.forecast import SplitForecast
from barnraise.training.pipeline.prediction.placement_watch import PlacementWatch
from barnraise.training.pipeline.weights import StageWeights
from barnraise.training.record.split_record import PlannedStep, SplitRecord
from barnraise.training.recovery.failures import exit_without_state, forget_frames, raise_if_permanent
from barnraise.training.state.adapter import describe_adapter
from barnraise.training.state.checkpoint_manager import CheckpointManager

log = logging.getLogger("barnraise.training")

_REMEASURE_S = 2.0  # between two measurements of free memory, while the model does not fit
_SHARE = 0.9  # of a machine's free memory that is planned with

_votes = msgspec.msgpack.Decoder(StageVote)
_holdings = msgspec.msgpack.Decoder(MemberHoldings)
_operations = msgspec.msgpack.Decoder(NextOperation)

T = TypeVar("T")


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
        self.runs: tuple[Run | None, ...] = ()  # of blocks, by rank
        self._manager, self._task = manager, task
        self._device, self._checkpoints = device, checkpoints
        self.adapter = describe_adapter(task.model)  # while the model has all its parts
        self._kept = KeptState()
        sent_bytes = task.codec.size(task.outline.shape)
        self.forecast = SplitForecast(manager, task.parts, task.order, sent_bytes)
        self._count = len(task.outline.blocks)
        self._held = MemberStage(task, weights, self._kept)
        self._exchange = StateExchange(self._held.names_of_unit, self._held.trained)
        self._stages = StageCheckpoints(checkpoints, self._held, self._exchange, self.adapter)
        self._disks: tuple[bool, ...] = ()  # by rank
        self._is_restored = False  # from a checkpoint, and no step was applied since
        self._placement = SplitPlacement(())  # by rank
        self._mirrors = MirrorPlacement((), ())
        self._is_ready = False
        self._is_new_group = True  # in which members may be at different places of the script
        self._performed = 0  # operations since the newest step
        self._work = LoadedStep(data, task.weigh, device)
        self._watch = PlacementWatch()
        self._memory_bytes, self._sharing = 0, 0  # workers of this machine
        self._generations = ReportedGenerations()
        self._said: dict[int, bytes] = {}  # to `gather` since the newest step, by the number of the operation

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
        self._take_turns("step")
        self._held.own.clear_gradients()
        loss = self._compute()
        phases = self.record.phases
        with phases.measure("communication"):
            add_replicas(self._manager.group, self._held, self._placement)
            send_to_mirrors(self._manager.group, self._held, self._mirrors)
        with phases.measure("vote"):
            votes = self._vote(loss)
        norm = math.sqrt(_sum(vote.squared_norm for vote in votes))
        clip = votes[0].clip
        factor = min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0
        self._commit(_sum(vote.loss for vote in votes), factor, votes)
        if any(vote.checkpoint_due for vote in votes):
            self.record.before_checkpoint()
            with phases.measure("checkpoint"):
                self._stages.save(self._manager, self._holders(), self._disks, self.done)
        if self._hand_over([vote.newest_generation for vote in votes]):
            self.join_next_group(None)
        elif votes[0].placement_due:
            self._regroup(is_new=False)
        elif self._manager.rank == 0:
            self._watch.note_step([vote.block_s for vote in votes])

    def _compute(self) -> float:
        """Compute the gradients of this worker's stage. Return the loss on the last stage, and else 0."""
        stage, placement, record = self._held.stage, self._placement, self.record
        pipeline = placement.pipeline_of(self._manager.rank)
        if stage is None or pipeline is None:
            return 0.0
        with record.phases.measure("data"):
            work = self._work.load(self.done, stage)
        share = placement.divide(len(work))[pipeline]
        own, ranks = work[share.start : share.stop], placement.pipelines[pipeline].order
        if not own:
            return 0.0
        stage.busy_s = 0.0
        with record.passes(stage):
            if len(ranks) == 1:
                loss = run_alone(stage, own, self._work.seed)
            else:
                loss = run_stage(stage, own, self._task.codec, self._work.seed, ranks, self._task.order)
        self.forecast.note_step(stage.busy_s, len(own), (stage.first, stage.end))
        return loss

    def _vote(self, loss: float) -> list[StageVote]:
        manager, has_stage = self._manager, self._held.stage is not None
        vote = StageVote(
            self.done,
            loss,
            self._held.own.squared_norm() if self._has_first_copy(manager.rank) else 0.0,
            manager.newest_generation(),
            self._work.fingerprint() if has_stage else b"",
            self._checkpoints.is_due(),
            self.record.speed(manager.rank, self._work.samples(self.done)),
            self.record.logged(),
            self.forecast.block.block_s,
            self._watch.is_due and manager.rank == 0,
            self.clip,
        )
        self._is_ready = True
        messages = manager.group.all_gather_bytes(msgspec.msgpack.encode(vote))
        votes = read_reports(manager, _votes, messages)
        check_votes(manager, votes)
        return votes

    def _commit(self, loss: float, factor: float, votes: Sequence[StageVote] = ()) -> None:
        """Apply the step: from here on it counts."""
        self._held.apply(factor)
        logged, speeds = [vote.logged for vote in votes], [vote.speed for vote in votes]
        self.record.commit(self._work.samples(self.done), loss, logged, speeds)
        self.done += 1
        self.loss, self.factor, self._is_ready, self._performed = loss, factor, False, 0
        self._is_restored = False
        self._said.clear()
        self.record.run_callbacks()

    def _has_first_copy(self, rank: int) -> bool:
        """Tell whether a rank is in the first pipeline, which has each block once."""
        return self._placement.pipeline_of(rank) == 0

    # operations between two steps

    def gather_trained(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters of all stages. Every worker that runs the script calls it."""
        return self._perform("save", self._gather_trained)

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all workers, by rank; empty of one that did not call it."""
        self._said[self._performed] = message
        return self._perform("gather", lambda: self._gather(message))

    def _perform(self, kind: OperationKind, operation: Callable[[], T]) -> T:
        """Perform an operation with all members, also if the group fails or a worker joins meanwhile."""
        while True:
            try:
                self._take_turns(kind)
                result = operation()
                break
            except CollectiveError as error:
                raise_if_permanent(error)
                self.join_next_group(error)
        self._performed += 1
        return result

    def _take_turns(self, kind: OperationKind) -> None:
        """Perform what others announce, until it is the turn of this worker's next operation."""
        while self._is_new_group:
            own = NextOperation(kind, self._performed)
            messages = self._manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
            turn = choose_turn(read_reports(self._manager, _operations, messages))
            self._is_new_group = turn.kind != "step"
            if self._manager.rank in turn.callers:
                return
            if turn.kind == "save":
                self._gather_trained()
            else:
                self._gather(self._said.get(turn.number, b""))

    def _gather_trained(self) -> dict[str, torch.Tensor]:
        held = self._held
        values = {name: parameter.detach().cpu() for name, parameter in held.own.parameters.items()}
        senders = [run if self._has_first_copy(rank) else None for rank, run in enumerate(self.runs)]
        result = self._exchange.gather_values(
            self._manager.group, values, [held.names_of_run(run) for run in senders]
        )
        self._wait_for_all()
        return result

    def _gather(self, message: bytes) -> list[bytes]:
        result = self._manager.group.all_gather_bytes(message)
        self._wait_for_all()
        return list(result)

    def _wait_for_all(self) -> None:
        """Wait until all members have received what this one has, so that it may leave."""
        try:
            self._manager.group.all_gather_bytes(b"")
        except CollectiveError as error:  # a member that has everything may have ended already
            log.info("the group failed after an operation: %s", error.message)

    # groups

    def _hand_over(self, reported: Sequence[int], holdings: Sequence[MemberHoldings] = ()) -> bool:
        """Send the trained state of members that are not in the next group to those that are.

        Return False if there is no next group, or most members do not know it. ``reported``: the newest
        generation that each member knows. ``holdings``: of the members, if they have no stages of this group
        yet.
        """
        manager, held = self._manager, self._held
        newest = self._generations.newest(reported)
        if newest <= manager.generation:
            return False
        notices = exchange_notices(manager, newest)
        if not is_confirmed(notices):
            names = ", ".join(map(manager.name_of, self._generations.ignore(reported, newest)))
            log.warning("%s: most agents do not know the group %d that it reports", names, newest)
            return False
        leaving = [notice.leaves for notice in notices]
        machines = manager.machines()
        if holdings:
            held_units = [{*each.own, *each.others} for each in holdings]
            free_bytes: Sequence[int | None] = [None] * len(leaving)
        else:
            held_units = [self._units_of_rank(rank) for rank in range(len(leaving))]
            free_bytes = self._mirrors.free_bytes
        members = list(map(StayingMember, machines, held_units, leaving, free_bytes))
        plan = plan_handover(members, held.unit_bytes())
        if plan.lost and manager.rank == 0:
            log.error("no machine that stays has memory for %d parts of what was trained", len(plan.lost))
        if not plan.transfers:
            return True
        names = ", ".join(manager.name_of(rank) for rank, leaves in enumerate(leaving) if leaves)
        log.warning("keeping what %s trained, before it leaves", names)
        received, schedule = self._exchange.run(
            manager.group, plan.transfers, held.export(), held.export_schedule(), range(manager.world)
        )
        self._kept.states |= received
        self._kept.schedule = schedule or self._kept.schedule
        self._wait_for_all()
        return True

    def _holders(self) -> dict[int, list[int]]:
        """Return by unit the ranks of this group that hold it; those that train it first."""
        ranks = sorted(range(self._manager.world), key=lambda rank: not self._has_first_copy(rank))
        trained = {rank: units_of(self.runs[rank], self._count) for rank in ranks}
        held = {rank: self._units_of_rank(rank) for rank in ranks}
        first = {unit: [rank for rank in ranks if unit in trained[rank]] for unit in range(self._count + 2)}
        return {
            unit: [*owners, *(rank for rank in ranks if unit in held[rank] and rank not in owners)]
            for unit, owners in first.items()
        }

    def _units_of_rank(self, rank: int) -> set[int]:
        """Return the units that a member of this group holds, as a stage or as mirrors."""
        runs = [self.runs[rank], *(self.runs[other] for other in self._mirrors.mirrored_by(rank))]
        return {unit for run in runs for unit in units_of(run, self._count)}

    def join_next_group(self, error: CollectiveError | None) -> None:
        """Join groups until one holds in which each worker has the stage that it was given."""
        while True:
            if error is not None:
                log.info("the group failed at step %d: %s", self.done, error.message)
            forget_frames(error)  # or the blocks that this worker gives away keep their memory
            self._generations = ReportedGenerations()
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

    def _regroup(self, *, is_new: bool = True) -> bool:
        """Take a stage in this group. Return False if the model does not fit on its machines for now.

        If the group is not ``is_new``, its members have stages, and keep them if the model does not fit.
        """
        manager = self._manager
        members = self.exchange_reports()
        is_trained = [bool(self._held.names_of_unit(unit)) for unit in range(self._count + 2)]
        decision = decide_regroup(members, is_trained)
        if not decision.holders and (decision.done or not manager.is_first_start):
            exit_without_state(finished=manager.finished)
        if decision.lost and decision.holders:
            if not manager.finished:
                lost = len(decision.lost)
                log.error("%d parts of the model were on machines that were lost together", lost)
            exit_without_state(finished=manager.finished)
        is_behind = not members[manager.rank].is_fresh and self.done < decision.done
        if is_behind and decision.apply_factor is not None:
            self._commit(decision.loss, decision.apply_factor)
        self._is_ready = False
        if any(member.is_fresh for member in members) and not members[manager.rank].is_fresh:
            self.record.hand_over()
        chosen = self._stages.choose(manager) if not decision.holders else None
        is_first = chosen is None and all(member.is_fresh for member in members)
        is_waiting = False
        while True:
            problem = self._problem(members)
            try:
                placement = self._place(problem)
                break
            except RunError as error:
                if is_first:  # all machines of the run are here
                    raise
                if not is_new:
                    self._watch.is_due = False
                    return True
                if not is_waiting:
                    log.warning("waiting for another machine, or for memory: %s", error.message)
                    manager.report_waiting("another machine, or more free memory")
                is_waiting = True
                time.sleep(_REMEASURE_S)
                members = self._exchange_holdings()
                if self._hand_over([member.newest_generation for member in members], members):
                    return False
        mirrors = self._place_mirrors(problem, placement)
        restored: RestoredState | None = None
        self._disks = tuple(member.has_disk for member in members)
        if not decision.holders:
            wanted = [self._wanted(placement, mirrors, rank) for rank in range(manager.world)]
            restored = self._stages.restore(manager, chosen, wanted, self._disks)
            decision = decision._replace(done=restored.done if restored is not None else 0)
        self.forecast.predict(problem, placement, decision.done)
        self._adopt(members, decision, placement, mirrors, restored)
        self._watch.start(problem, placement)
        if manager.world > 1:
            manager.group.make_default()
        return True

    def _problem(self, members: Sequence[MemberHoldings]) -> SplitProblem:
        """Return what has to be placed on the members of this group."""
        held = [HeldBlocks(blocks_of(member.own), blocks_of(member.others)) for member in members]
        return self.forecast.problem([member.memory_bytes for member in members], self._work.batches, held)

    def _wanted(self, placement: SplitPlacement, mirrors: MirrorPlacement, rank: int) -> set[int]:
        """Return the units whose trained state a rank needs in this placement."""
        runs = [placement.run_of(rank), *map(placement.run_of, mirrors.mirrored_by(rank))]
        return {unit for run in runs for unit in units_of(run, self._count)}

    def exchange_reports(self) -> list[MemberHoldings]:
        """Exchange what each member of the group holds, and the speeds of machines and links."""
        members = self._exchange_holdings()
        self.forecast.exchange()
        return members

    def _exchange_holdings(self) -> list[MemberHoldings]:
        self._measure_memory()
        own = MemberHoldings(
            self.done,
            self._held.own_units,
            self._held.other_units,
            self._is_ready,
            self.factor,
            self.loss,
            self._memory_bytes,
            self._task.facts,
            self._manager.newest_generation(),
            self._is_restored,
            self._checkpoints.has_disk,
        )
        messages = self._manager.group.all_gather_bytes(msgspec.msgpack.encode(own))
        members = read_reports(self._manager, _holdings, messages)
        refuse(self._manager, judge_holdings(members, names_of(self._manager), self._count + 2))
        return members

    def _measure_memory(self) -> None:
        """Measure the memory for this worker's stage, with what it holds now. Workers of a CPU share it.

        The largest value counts: a process that has just died keeps its memory for some seconds. With another
        number of workers on this machine, only the newest value does.
        """
        machines = self._manager.machines()
        sharing = machines.count(machines[self._manager.rank])
        free = free_memory(self._device) // (sharing if self._device.type == "cpu" else 1)
        # Computing takes more for a moment, such as a copy of a weight in another layout.
        memory_bytes = max(1, int(_SHARE * (free + self._held.held_bytes())))
        if sharing == self._sharing:
            memory_bytes = max(memory_bytes, self._memory_bytes)
        self._sharing, self._memory_bytes = sharing, memory_bytes

    def _place(self, problem: SplitProblem) -> SplitPlacement:
        placement = place_pipelines(problem)
        if self._manager.rank == 0:
            for line in (*placement.why, *placement.why_spare):
                log.warning(line)
        return placement

    def _place_mirrors(self, problem: SplitProblem, placement: SplitPlacement) -> MirrorPlacement:
        manager, machines = self._manager, self._manager.machines()
        alone = problem._replace(has_mirrors=False)
        mirrored = []
        for rank, machine in enumerate(problem.machines):
            needed = trained = 0
            if (pipeline := placement.pipeline_of(rank)) is not None:
                order, runs, *_ = placement.pipelines[pipeline]
                place, stages = order.index(rank), len(order)
                trained = mirror_bytes(problem.parts, *runs[place])
                needed = alone.stage_bytes(*runs[place], stages=stages, place=place)
            free = machine.memory_bytes - needed if machine.memory_bytes else None
            units = frozenset(units_of(placement.run_of(rank), self._count))
            neighbours = placement.neighbours_of(rank)
            mirrored.append(MirrorMember(machine.name, machines[rank], trained, free, units, neighbours))
        mirrors = place_mirrors(mirrored)
        if manager.rank == 0:
            for line in mirrors.why:
                log.warning(line)
        return mirrors

    def _adopt(
        self,
        members: Sequence[MemberHoldings],
        decision: RegroupDecision,
        placement: SplitPlacement,
        mirrors: MirrorPlacement,
        restored: RestoredState | None,
    ) -> None:
        """Take the stage and the mirrors that the placement gives to this worker."""
        manager, held = self._manager, self._held
        runs = tuple(placement.run_of(rank) for rank in range(manager.world))
        if restored is not None:
            states, schedule = restored.states, restored.schedule
            self.record.state_origin = "checkpoint"
        else:
            transfers = plan_transfers(members, runs, mirrors.mirrors, decision.holders, self._count)
            states, schedule = held.export(), held.export_schedule()
            received, schedule = self._exchange.run(
                manager.group, transfers, states, schedule, set(decision.holders.values())
            )
            states |= received
            self.record.count_moved(received, held.names_of_run(runs[manager.rank]))
        if decision.holders:
            self._kept.states, self._kept.schedule = states, schedule
        mirrored = {other: runs[other] for other in mirrors.mirrored_by(manager.rank)}
        held.build(runs[manager.rank], {other: run for other, run in mirrored.items() if run is not None})
        if decision.holders or restored is not None:
            held.load(states, schedule)
        self._is_restored = restored is not None or decision.is_restored
        self.done, self.loss, self.runs, self._mirrors = decision.done, decision.loss, runs, mirrors
        self._placement = placement
        names = [manager.name_of(rank) for rank in range(manager.world)] if manager.rank == 0 else []
        plan = self.forecast.plan
        why = [*placement.why, *placement.why_spare, *mirrors.why]
        if plan is not None:
            why.append(plan.step.sentence)
        shares = placement.divide(self._work.batches)
        pipelines = map(placement.pipeline_of, range(manager.world))
        batches = [len(shares[number]) if number is not None else 0 for number in pipelines]
        step = plan.planned if plan is not None else PlannedStep()
        self.record.place(self.done, runs, names, why, step, batches)
        if decision.apply_factor is not None:
            self.factor = decision.apply_factor
        self._manager.group.all_gather_bytes(b"")  # all have their state
        self._kept.clear()
        self._is_new_group = True


def _sum(values: Iterable[float]) -> float:
    """Return an exact sum, or one that is no finite number if a value is none."""
    numbers = list(values)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
