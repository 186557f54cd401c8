"""A run of split models in threads of one process, with groups in memory and faults at chosen operations.

Only one thread computes at a time, so random numbers are those of one process. A fault belongs to an
operation of a worker: an all-gather, a send, or a receive. The worker's machine dies there, or its link
breaks, before or after it has sent its part. A group whose member has left fails for all, and the workers
that live form the next one.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from barnraise.core.errors import CollectiveError, PeerLost, WorkerRefused
from barnraise.planning.split.stage_time import BlockSpeed
from barnraise.training.group.single import CompletedWork, SingleWorkerManager
from barnraise.training.pipeline import split_loop, split_training
from barnraise.training.pipeline.members.member_stage import MemberStage
from barnraise.training.pipeline.passes.activations import ActivationCodec
from barnraise.training.pipeline.passes.schedule import MicroBatchWork
from barnraise.training.pipeline.prediction import forecast
from barnraise.training.pipeline.prediction.forecast import SplitForecast
from barnraise.training.pipeline.stage import Stage
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager

Kind = Literal["die", "die-after", "break", "break-after"]
Script = Callable[[Session, "SimulatedManager"], Any]

_GATHER = "all-gather"
# All-gathers of the first group: reports, speeds, checkpoints, schedules, and two before the step.
_BEFORE_VOTES = 6
_NOTHING_S = 300.0  # without any change: a deadlock


class Killed(BaseException):
    """The end of a thread whose machine dies."""


class StateLost(BaseException):
    """The end of a thread whose machine has no state to continue from."""


class Operation(NamedTuple):
    """Operation that a worker has performed in a group; ``what``: in words."""

    generation: int
    what: str


class Vote(NamedTuple):
    """Vote on a step in the first group."""

    step: int


class InGroup(NamedTuple):
    """Operation by its number in a group. How many came before it in other groups may differ."""

    generation: int
    number: int


class Fault(NamedTuple):
    """Fault of a worker at one of its operations. A machine dies with all its workers."""

    machine: str
    operation: int | Vote | InGroup
    kind: Kind


def _honest(message: bytes) -> bytes:
    return message


class _Generation:
    """State that the members of one group share."""

    def __init__(self, number: int, members: tuple[str, ...]) -> None:
        self.number, self.members = number, members
        self.gone: set[str] = set()
        self.gathers: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.channels: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)


class _Link(NamedTuple):
    """Measured link between two machines."""

    mbps: float = 8000.0
    rtt_s: float = 0.0002


class _Survey:
    """Topology in which all links are alike, so that nothing is measured."""

    def link(self, *ends: str) -> _Link:
        return _Link()


class _Receive:
    def __init__(self, group: SimulatedGroup, tensor: torch.Tensor, sender: int) -> None:
        self._group, self._tensor, self._sender = group, tensor, sender

    def wait(self) -> None:
        self._group.finish_receive(self._tensor, self._sender)


class SimulatedGroup:
    """One member's view of a group."""

    def __init__(self, run: SimulatedRun, shared: _Generation, machine: str) -> None:
        self._run, self._shared, self._machine = run, shared, machine
        self.rank, self.world = shared.members.index(machine), len(shared.members)
        self._gathered = 0

    @property
    def nodes(self) -> Sequence[bytes]:
        return [name.encode() for name in self._shared.members if name != self._machine]

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        message = self._run.lies.get(self._machine, _honest)(message)
        rows = self._shared.gathers[self._gathered]
        self._gathered += 1

        def send() -> None:
            rows[self.rank] = message

        self._run.perform(self._machine, f"{_GATHER} of {len(message)} bytes", self._checked(send))
        self._run.wait(lambda: len(rows) == self.world or bool(self._shared.gone), self._machine)
        if len(rows) < self.world:
            self._raise_lost()
        return [rows[rank] for rank in range(self.world)]

    def send_async(self, tensor: torch.Tensor, to: int) -> CompletedWork:
        assert to != self.rank
        channel = self._shared.channels[self.rank, to]
        copy = tensor.detach().clone()
        self._run.perform(self._machine, f"send to {to}", self._checked(lambda: channel.append(copy)))
        return CompletedWork()

    def receive_async(self, tensor: torch.Tensor, sender: int) -> _Receive:
        assert sender != self.rank
        return _Receive(self, tensor, sender)

    def finish_receive(self, tensor: torch.Tensor, sender: int) -> None:
        channel = self._shared.channels[sender, self.rank]
        self._run.perform(self._machine, f"receive from {sender}", lambda: None)
        self._run.wait(lambda: bool(channel) or bool(self._shared.gone), self._machine)
        if not channel:
            self._raise_lost()
        received = channel.popleft()
        assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(received)

    def make_default(self) -> None:
        return

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        self._shared.gone.add(self._machine)
        self._run.changed.notify_all()

    def _checked(self, send: Callable[[], object]) -> Callable[[], object]:
        if self._shared.gone:
            self._raise_lost()
        return send

    def _raise_lost(self) -> None:
        raise PeerLost(self._shared.members.index(min(self._shared.gone)), "it has left")


class SimulatedManager(SingleWorkerManager):
    """Group manager of one machine of a simulated run."""

    group: Any
    rank: int
    world: int
    generation: int

    def __init__(self, run: SimulatedRun, machine: str) -> None:
        super().__init__()
        self.run, self.machine = run, machine
        self.waits_for: list[str] = []
        self.members: tuple[str, ...] = ()
        self.generation = 0

    def machines(self) -> tuple[str, ...]:
        return tuple(self.run.place(name).encode().ljust(32, b"\0").hex() for name in self.members)

    def name_of(self, rank: int) -> str:
        return self.members[rank]

    def newest_generation(self) -> int:
        is_leaving = self.machine in self.run.leaving
        return self.generation if is_leaving else self.generation + self.run.wants_change()

    def is_member(self, generation: int) -> bool | None:
        newest = self.generation + self.run.wants_change()
        return None if generation > newest else self.machine not in self.run.leaving

    def wait_for_admission(self) -> None:
        self.run.wait(lambda: self.machine not in self.run.later, self.machine, waits_long=True)

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.run.join(self)

    def report_waiting(self, reason: str) -> None:
        if reason:
            self.waits_for.append(reason)

    def survey(self) -> Any:
        return self.run.survey


class SimulatedRun:
    """Workers, each with one letter, that run one script in threads.

    ``later``: the step after which a worker joins. ``leaves``: the one after which it leaves. ``places``: the
    machine of a worker, if it is not alone on its own. ``speeds``: the seconds that a block takes on a
    worker, if it is not one; ``probes``: they are measured before the first step. ``memory``: in bytes.
    ``lies``: change what a worker sends to all others. ``checkpoints``: makes the checkpoint manager of a
    machine.
    """

    def __init__(
        self,
        machines: str,
        script: Script,
        *,
        later: Mapping[str, int] | None = None,
        leaves: Mapping[str, int] | None = None,
        places: Mapping[str, str] | None = None,
        speeds: Mapping[str, float] | None = None,
        probes: bool = False,
        memory: Mapping[str, int] | None = None,
        faults: Sequence[Fault] = (),
        lies: Mapping[str, Callable[[bytes], bytes]] | None = None,
        checkpoints: Callable[[str], CheckpointManager] | None = None,
    ) -> None:
        self._checkpoints = checkpoints or (lambda machine: CheckpointManager(None, 60.0, 1))
        self.speeds, self.probes, self.memory = dict(speeds or {}), probes, dict(memory or {})
        self.machines, self._script = machines, script
        self.lies = dict(lies or {})
        self.changed = threading.Condition()
        self.later, self._places = dict(later or {}), dict(places or {})
        self._leaves = dict(leaves or {})
        self._faults: dict[tuple[str, int | Vote | InGroup | None], Kind] = {
            (fault.machine, fault.operation): fault.kind for fault in faults
        }
        self.operations: dict[str, list[Operation]] = {name: [] for name in machines}
        self.survey = _Survey()
        self.leaving: set[str] = set()
        self.members: tuple[str, ...] = ()
        self.generations: list[str] = []
        self.results: dict[str, Any] = {}
        self.ends: dict[str, BaseException] = {}
        self.managers: dict[str, SimulatedManager] = {}
        self._alive = set(machines)
        self._dead_places: set[str] = set()
        self._arrived: set[str] = set()
        self._shared: _Generation | None = None

    def run(self) -> dict[str, Any]:
        """Return what the script returns, by machine that has come to its end."""
        threads = [threading.Thread(target=self._main, args=(name,), name=name) for name in self.machines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, end in self.ends.items():
            if not isinstance(end, Killed | StateLost | WorkerRefused):
                raise AssertionError(f"{name} failed after {self.operations[name][-5:]}") from end
        return self.results

    def place(self, machine: str) -> str:
        return self._places.get(machine, machine)

    def wants_change(self) -> bool:
        """Tell whether a machine waits to join, or leaves."""
        outside = self._alive - self.later.keys() - set(self.members) - self.leaving
        return bool(outside or self.leaving & set(self.members))

    def note_step(self, done: int) -> None:
        """Let workers join and leave whose step has come."""
        self.leaving |= {name for name, step in self._leaves.items() if step <= done}
        for name in [name for name, step in self.later.items() if step <= done]:
            del self.later[name]
            self.changed.notify_all()

    def perform(self, machine: str, what: str, effect: Callable[[], object]) -> None:
        """Perform an operation of a worker, with its fault."""
        self._die_with_machine(machine)
        number = len(self.operations[machine])
        self.operations[machine].append(Operation(self.managers[machine].generation, what))
        gathers = sum(
            each.generation == 1 and each.what.startswith(_GATHER) for each in self.operations[machine]
        )
        is_first = self.managers[machine].generation == 1 and what.startswith(_GATHER)
        vote = Vote(gathers - _BEFORE_VOTES) if is_first else None
        generation = self.managers[machine].generation
        earlier = [each for each in self.operations[machine][:-1] if each.generation == generation]
        places = (number, vote, InGroup(generation, len(earlier)))
        kind: str = next(
            (self._faults[machine, each] for each in places if (machine, each) in self._faults), ""
        )
        if not kind.endswith("-after"):
            self._fail(kind)
        effect()
        self.changed.notify_all()
        self._fail(kind.removesuffix("-after"))

    def _fail(self, kind: str) -> None:
        if kind == "die":
            raise Killed
        if kind == "break":
            raise PeerLost(0, "the link is broken")

    def wait(self, is_over: Callable[[], bool], machine: str, *, waits_long: bool = False) -> None:
        def is_dead_or_over() -> bool:
            return self.place(machine) in self._dead_places or is_over()

        while not self.changed.wait_for(is_dead_or_over, timeout=_NOTHING_S):
            if not waits_long or len(self._alive) == 1:
                raise AssertionError(f"{machine} waits without end after {self.operations[machine][-5:]}")
        self._die_with_machine(machine)

    def _die_with_machine(self, machine: str) -> None:
        if self.place(machine) in self._dead_places:
            raise Killed

    def join(self, manager: SimulatedManager) -> None:
        """Wait until all machines that live have left the last group, and enter the next one."""
        if self._shared is not None and manager.machine in self._shared.members:
            manager.group.close()
        if manager.machine in self.leaving:
            raise Killed
        self._arrived.add(manager.machine)
        self._form()
        self.wait(lambda: manager.machine not in self._arrived, manager.machine)
        assert self._shared is not None
        manager.members = members = self._shared.members
        manager.generation = self._shared.number
        manager.rank, manager.world = members.index(manager.machine), len(members)
        manager.group = SimulatedGroup(self, self._shared, manager.machine)

    def _form(self) -> None:
        living = {name for name in self._alive if self.place(name) not in self._dead_places}
        expected = living - self.later.keys() - self.leaving
        if not self._arrived or not expected <= self._arrived:
            return
        number = self._shared.number + 1 if self._shared is not None else 1
        kept = [name for name in self.members if name in expected]
        self.members = (*kept, *(name for name in self.machines if name in expected and name not in kept))
        self.generations.append("".join(self.members))
        self._shared = _Generation(number, self.members)
        self._arrived.clear()
        self.changed.notify_all()

    def _main(self, machine: str) -> None:
        with self.changed:
            manager = self.managers[machine] = SimulatedManager(self, machine)
            try:
                checkpoints = self._checkpoints(self.place(machine))
                session = Session(manager, seed=0, unit=2, checkpoints=checkpoints)
                self.results[machine] = self._script(session, manager)
            except BaseException as error:
                self.ends[machine] = error
                if isinstance(error, Killed):
                    self._dead_places.add(self.place(machine))
            self._alive.discard(machine)
            self._arrived.discard(machine)
            self.later = {} if not self._alive - self.later.keys() else self.later
            if self._shared is not None and machine in self._shared.members:
                self._shared.gone.add(machine)
            self._form()
            self.changed.notify_all()


def simulate_stage(
    stage: Stage,
    work: Sequence[MicroBatchWork],
    codec: ActivationCodec,
    seed: Callable[[int, int], None],
    ranks: Sequence[int],
    order: str = "1F1B",
) -> float:
    """Compute the gradients of a step as `run_stage` does, over the group of the thread's machine."""
    group = _threads.manager.group
    place = ranks.index(group.rank)
    before = ranks[place - 1] if not stage.is_first else None
    after = ranks[place + 1] if not stage.is_last else None
    losses, passes = [], []
    for each in work:
        received = None
        if before is not None:
            received = torch.empty(each.shape, dtype=codec.dtype)
            group.receive_async(received, before).wait()
            received.requires_grad_()
        stage.seed = lambda block, number=each.number: seed(number, block)  # type: ignore[misc]
        result = stage(received, each.inputs)
        if after is not None:
            group.send_async(result, after)
        else:
            result = (result * each.share).float()
            losses.append(result.item())
        passes.append((received, result))
    for received, result in passes:
        gradient = None
        if after is not None:
            gradient = torch.empty_like(result)
            group.receive_async(gradient, after).wait()
        if result.requires_grad:
            result.backward(gradient)  # type: ignore[no-untyped-call]
        if before is not None and received is not None:
            given = received.grad if received.grad is not None else torch.zeros_like(received)
            group.send_async(given, before)
    block_s = _threads.manager.run.speeds.get(_threads.manager.machine, 1.0)
    stage.busy_s = len(work) * (stage.end - stage.first) * block_s
    return sum(losses)


_threads: Any = threading.local()


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let split models of this process use simulated groups."""
    trace = split_training.trace_outline  # type: ignore[attr-defined]
    kept = split_training.measure_kept  # type: ignore[attr-defined]

    def once(function: Any) -> Any:
        results: list[Any] = []

        def call(*args: Any) -> Any:
            if not results:
                results.append(function(*args))
            return results[0]

        return call

    def lose_state(*, finished: bool) -> None:
        raise StateLost

    exchange, free_memory = SplitForecast.exchange, split_loop.free_memory  # type: ignore[attr-defined]

    def probe_and_exchange(own: SplitForecast) -> None:
        manager = getattr(_threads, "manager", None)
        if manager is not None and manager.run.probes and not own.block.block_s:
            block_s = manager.run.speeds.get(manager.machine, 1.0)
            own.block = BlockSpeed(block_s / 3, 2 * block_s / 3)
        exchange(own)

    def limited_memory(device: torch.device) -> int:
        manager = getattr(_threads, "manager", None)
        limit = manager.run.memory.get(manager.machine, 0) if manager is not None else 0
        return int(limit / 0.9) or int(free_memory(device))

    monkeypatch.setattr(SplitForecast, "exchange", probe_and_exchange)
    for module in (split_training, forecast):  # only weights take memory
        monkeypatch.setattr(module, "with_kept", lambda parts, kept: parts)
    monkeypatch.setattr(split_loop, "free_memory", limited_memory)
    monkeypatch.setattr(MemberStage, "held_bytes", lambda self: 0)  # what is free above includes it
    monkeypatch.setattr(split_loop, "run_stage", simulate_stage)
    monkeypatch.setattr(split_loop, "exit_without_state", lose_state)
    monkeypatch.setattr(split_training, "trace_outline", once(trace))
    monkeypatch.setattr(split_training, "measure_kept", once(kept))


def bind(manager: SimulatedManager) -> None:
    """Make a manager that of the current thread."""
    _threads.manager = manager


def load(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(path))
