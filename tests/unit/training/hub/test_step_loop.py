"""All machines of a site as one member of a hub: shared leases, requests to the hub, and failed groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.core.errors import CollectiveError, RunError
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.hub.leased_data import sub_spans
from barnraise.training.hub.parameter_server import (
    LeasedWork,
    ModelSpec,
    ParameterServer,
    RoundUpdate,
    SampleRange,
)
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.throughput import Throughput
from tests.unit.training.flat_loop import microbatches
from tests.unit.training.threaded_group import PendingCopy, SharedExchange, ThreadWorker, run_workers

SAMPLES, BATCH, UNIT = 96, 16, 2
_DRAWING = threading.Lock()
OVER = LeasedWork((), 0, 1)


@pytest.fixture(autouse=True)
def _equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make assignments independent of the load of this machine."""
    monkeypatch.setattr(Throughput, "speed", lambda self: 1.0)


def task(number: int, first: int, last: int, *, epoch: int = 0, members: int = 2) -> LeasedWork:
    return LeasedWork((SampleRange(epoch, first, last),), number * 32, members, f"lease {number}".encode())


TASKS = (task(0, 0, 32), task(1, 40, 72), task(2, 72, 96), OVER)


class FakeHub:
    """Hub that applies half of each change, and counts a lease once."""

    def __init__(self, tasks: tuple[LeasedWork, ...] = TASKS) -> None:
        self.tasks = tasks
        self.state: torch.Tensor | None = None
        self.handed: list[RoundUpdate] = []
        self.asked = 0
        self.at = threading.Lock()

    def line(self, is_slow: Callable[[], bool] = lambda: False) -> Line:
        return Line(self, is_slow)


class Line:
    """Connection of one machine to the hub."""

    def __init__(self, hub: FakeHub, is_slow: Callable[[], bool]) -> None:
        self.hub, self._is_slow = hub, is_slow
        self.spoke: list[str] = []
        self.has: bytes | None = None

    def begin(self, form: ModelSpec, state: torch.Tensor) -> LeasedWork:
        self.spoke.append("begin")
        with self.hub.at:
            if self.hub.state is None:
                self.hub.state = state.clone()
            state.copy_(self.hub.state)
        return self._next()

    def continue_lease(self, spec: ModelSpec, lease: LeasedWork) -> None:
        self.spoke.append("go on")
        self.has = lease.token

    def exchange(self, handed: RoundUpdate, state: torch.Tensor) -> LeasedWork:
        self.spoke.append("exchange")
        while self._is_slow():
            time.sleep(0.01)
        with self.hub.at:
            current = self.hub.tasks[len(self.hub.handed)]
            assert self.hub.state is not None
            if self.has == current.token:
                self.hub.handed.append(handed)
                self.hub.state = self.hub.state - 0.5 * handed.change
            state.copy_(self.hub.state)
        return self._next()

    def _next(self) -> LeasedWork:
        work = self.hub.tasks[len(self.hub.handed)]
        self.has = work.token
        return work


class Home:
    """Training on one machine of the site."""

    def __init__(
        self, manager: Any, line: ParameterServer | None, *, norms: bool = True, epochs: int = 3
    ) -> None:
        with _DRAWING:  # all threads share torch's generator
            torch.manual_seed(0)
            norm = torch.nn.BatchNorm1d(8) if norms else torch.nn.Identity()
            layers = torch.nn.Linear(5, 8, bias=False), norm, torch.nn.Tanh(), torch.nn.Linear(8, 1)
            x = torch.randn(SAMPLES, 5, dtype=torch.float64)
        self.net = torch.nn.Sequential(*layers).double()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        saving = CheckpointManager(None, 60.0, 1)
        self.run = Session(
            manager, seed=3, unit=UNIT, checkpoints=saving, parameter_server=line, is_site=True
        )
        self.hashes: list[str] = []
        self.seen: list[int] = []
        data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        prepared = self.run.prepare(self.net, self.optimizer, loader, self.scheduler)
        self.run.on_commit(lambda run: self.hashes.append(run.state_digest()))
        for _ in self.run.epochs(epochs):
            for rows, wanted, places in microbatches(prepared[2]):
                self.seen += places.tolist()
                loss = torch.nn.functional.mse_loss(self.net(rows), wanted)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.run.log(loss=loss)

    @property
    def order(self) -> list[int]:
        return self.run._data.data_order.sample_order(0).tolist()  # type: ignore[union-attr,no-any-return]


def leased(home: Home) -> list[int]:
    return sorted(home.order[0:32] + home.order[40:96])


def test_lease_positions_are_cut_into_steps() -> None:
    spans = (SampleRange(0, 4, 10), SampleRange(1, 0, 3), SampleRange(1, 8, 9))
    assert sub_spans(spans, 0, 100) == spans
    assert sub_spans(spans, 2, 3) == (SampleRange(0, 6, 9),)
    assert sub_spans(spans, 5, 3) == (SampleRange(0, 9, 10), SampleRange(1, 0, 2))
    assert sub_spans(spans, 9, 5) == (SampleRange(1, 8, 9),)
    assert sub_spans(spans, 10, 5) == ()
    for size in range(1, 11):
        steps = [sub_spans(spans, place, size) for place in range(0, 10, size)]
        places = [(span.epoch, at) for step in steps for span in step for at in range(span.first, span.last)]
        assert places == [(span.epoch, at) for span in spans for at in range(span.first, span.last)]


def test_machines_of_site_share_each_lease() -> None:
    hub = FakeHub()
    lines = [hub.line() for _ in range(3)]
    homes = run_workers(3, lambda worker: Home(worker, lines[worker.rank]))
    assert sorted(sample for home in homes for sample in home.seen) == leased(homes[0]), "each sample once"
    assert all(home.seen for home in homes)
    assert homes[0].hashes == homes[1].hashes == homes[2].hashes
    assert [update.samples for update in hub.handed] == [32, 32, 24]
    assert [update.loss is not None and update.loss > 0 for update in hub.handed] == [True] * 3
    assert [line.spoke for line in lines] == [["begin", "exchange", "exchange", "exchange"], [], []]


@pytest.mark.parametrize("norms", [True, False])
def test_update_of_site_equals_update_of_one_machine(norms: bool) -> None:
    alone, together_with = FakeHub(), FakeHub()
    single = Home(SingleWorkerManager(), alone.line(), norms=norms)
    line = together_with.line()
    homes = run_workers(3, lambda worker: Home(worker, None if worker.rank else line, norms=norms))
    assert sorted(single.seen) == leased(single)
    assert homes[0].scheduler.last_epoch == single.scheduler.last_epoch == 64 // BATCH
    for single_update, site_update in zip(alone.handed, together_with.handed, strict=True):
        torch.testing.assert_close(site_update.change, single_update.change, rtol=0, atol=1e-6)
        assert float(single_update.change.abs().max()) > 1e-3


def test_first_capable_machine_talks_to_hub() -> None:
    hub = FakeHub()
    line = hub.line()
    homes = run_workers(3, lambda worker: Home(worker, line if worker.rank == 1 else None))
    assert line.spoke == ["begin", "exchange", "exchange", "exchange"]
    assert homes[0].hashes == homes[2].hashes


def test_machine_failing_to_talk_is_replaced_by_next() -> None:
    """A full disk on one machine, for example, does not end the training."""
    hub = FakeHub()
    lines = [hub.line(), hub.line()]

    def full(handed: RoundUpdate, state: torch.Tensor) -> LeasedWork:
        raise OSError(28, "No space left on device")

    lines[0].exchange = full  # type: ignore[method-assign]
    homes = run_workers(2, lambda worker: Home(worker, lines[worker.rank]))
    assert len(hub.handed) == len(hub.tasks) - 1
    assert homes[0].hashes == homes[1].hashes
    assert "exchange" in lines[1].spoke


def test_site_without_hub_package_reports_install_hint() -> None:
    with pytest.raises(RunError, match="none of the remaining machines") as caught:
        run_workers(2, lambda worker: Home(worker, None))
    assert "[hub]" in caught.value.hint


@pytest.mark.parametrize(("norms", "count"), [(True, 4), (False, 8)])
def test_step_of_site_is_split_finely_without_batch_norms(norms: bool, count: int) -> None:
    home = Home(SingleWorkerManager(), FakeHub((*TASKS[:1], OVER)).line(), norms=norms, epochs=0)
    units = home.run._data.microbatches(0)  # type: ignore[union-attr]
    assert len(units) == count
    assert sum(unit.size for unit in units) == BATCH // 2


class Coming(ThreadWorker):
    """Worker that learns of a new group while it waits for the hub, which answers only after the regroup."""

    def __init__(self, exchange: SharedExchange, rank: int, line: Line, has_met: threading.Event) -> None:
        super().__init__(exchange, rank)
        self._line, self._has_met, self.met = line, has_met, 0

    def newest_generation(self) -> int:
        return self.generation + (self.met == 1 and "exchange" in self._line.spoke)

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.met += 1
        self.generation = self.met  # type: ignore[misc]
        self._exchange.barrier.wait()
        if self.met == 2:
            self._has_met.set()


def test_joining_worker_does_not_wait_for_hub() -> None:
    hub, has_met = FakeHub(), threading.Event()
    line = hub.line(lambda: not has_met.is_set())

    def member(worker: ThreadWorker) -> Home:
        return Home(Coming(worker._exchange, worker.rank, line, has_met), None if worker.rank else line)

    homes = run_workers(2, member)
    assert homes[0].run._manager.met == 2  # type: ignore[attr-defined]
    assert line.spoke == ["begin", "exchange", "exchange", "exchange"], "it is asked once"
    assert [update.samples for update in hub.handed] == [32, 32, 24]
    assert homes[0].hashes == homes[1].hashes


class Cut(ThreadWorker):
    """Worker whose groups fail at given calls; ranks rotate with each group."""

    def __init__(self, exchange: SharedExchange, rank: int, at: set[int]) -> None:
        super().__init__(exchange, rank)
        self._at, self._count, self.met = at, 0, 0

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        self._break()
        return super().all_gather_bytes(message)

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingCopy:
        self._break()
        return super().all_reduce_async(tensor)

    def _break(self) -> None:
        self._count += 1
        if self._count in self._at:
            raise CollectiveError("a member is gone")

    def join_next_group(self, error: CollectiveError | None) -> None:
        self.met += 1
        self._exchange.barrier.wait()
        if self.met > 1:  # the worker that asked the hub is not rank 0 any more
            self.rank = (self.rank + 1) % self.world


def test_lease_counts_once_at_any_group_failure() -> None:
    """Another machine asks again if the group fails between the hub's answer and the commit."""
    calm = FakeHub()
    expected = run_workers(2, lambda worker: Home(worker, calm.line()))[0]
    spoke = set()
    for at in range(2, 26, 2):
        hub = FakeHub()
        lines = [hub.line(), hub.line()]

        def member(worker: ThreadWorker, at: int = at, lines: list[Line] = lines) -> Home:
            return Home(Cut(worker._exchange, worker.rank, {at, at + 9}), lines[worker.rank])

        homes = run_workers(2, member)
        spoke.add(tuple(bool(line.spoke) for line in lines))
        assert [update.samples for update in hub.handed] == [32, 32, 24], at
        assert homes[0].hashes[-1] == homes[1].hashes[-1], at
        for expected_update, update in zip(calm.handed, hub.handed, strict=True):
            torch.testing.assert_close(update.change, expected_update.change, rtol=0, atol=1e-6)
        torch.testing.assert_close(homes[0].net.state_dict(), expected.net.state_dict(), rtol=0, atol=1e-5)
    assert (True, True) in spoke
