"""Session of one machine at a hub: the samples it trains, its updates, and the resulting model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from barnraise.core.errors import RunError
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.hub.parameter_server import LeasedWork, ModelSpec, RoundUpdate, SampleRange
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager

SAMPLES, BATCH = 64, 8


class FakeHub:
    """Hub with one member that applies half of each change."""

    def __init__(self, tasks: list[LeasedWork], start: torch.Tensor | None = None) -> None:
        self.tasks, self.start = tasks, start
        self.handed: list[RoundUpdate] = []
        self.form: ModelSpec | None = None

    def begin(self, form: ModelSpec, state: torch.Tensor) -> LeasedWork:
        self.form = form
        if self.start is not None:
            state.copy_(self.start)
        return self.tasks.pop(0)

    def exchange(self, handed: RoundUpdate, state: torch.Tensor) -> LeasedWork:
        self.handed.append(handed._replace(change=handed.change.clone()))
        state.sub_(handed.change, alpha=0.5)
        return self.tasks.pop(0)


class Friend:
    def __init__(self, hub: FakeHub, **more: Any) -> None:
        torch.manual_seed(0)
        x = torch.randn(SAMPLES, 4)
        self.data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.run = Session(
            SingleWorkerManager(),
            seed=3,
            unit=2,
            checkpoints=CheckpointManager(None, 60.0, 1),
            parameter_server=hub,
            **more,
        )
        self.seen: list[list[int]] = []

    def train(self, epochs: int = 2) -> Friend:
        loader = DataLoader(self.data, batch_size=BATCH, shuffle=True)
        _, _, batches, _ = self.run.prepare(self.net, self.optimizer, loader, self.scheduler)
        self.first = {name: value.clone() for name, value in self.net.state_dict().items()}
        for _ in self.run.epochs(epochs):
            self.seen.append([])
            for batch in batches:
                for x, y, places in batch:
                    self.seen[-1] += places.tolist()
                    loss = torch.nn.functional.mse_loss(self.net(x), y)
                    loss.backward()
                    self.run.log(loss=loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.scheduler.step()
        return self


OVER = LeasedWork((), 128, 1)


def task(epoch: int, *spans: tuple[int, int], covered: int = 0, members: int = 1) -> LeasedWork:
    return LeasedWork(tuple(SampleRange(epoch, first, last) for first, last in spans), covered, members)


def test_leased_samples_are_trained_and_change_is_sent() -> None:
    tasks = [task(0, (0, 16), (40, 48)), task(0, (48, 64), covered=40, members=2), OVER]
    hub = FakeHub(tasks)
    friend = Friend(hub).train()
    order = friend.run._data.data_order.sample_order(0).tolist()  # type: ignore[union-attr]
    assert friend.seen[0] == order[0:16] + order[40:48] + order[48:64]
    assert [handed.samples for handed in hub.handed] == [24, 16]
    assert all(handed.loss is not None and handed.loss > 0 for handed in hub.handed)
    assert hub.form is not None
    names = [entry.name for entry in hub.form.layout]
    assert names[0] == "0.weight"
    assert "1.running_var" in names
    assert "1.num_batches_tracked" not in names
    assert (hub.form.samples, hub.form.batch, hub.form.seed) == (SAMPLES, BATCH, 3)
    flat = torch.cat([friend.first[name].reshape(-1) for name in names])
    for handed in hub.handed:
        flat -= 0.5 * handed.change
    now = torch.cat([friend.net.state_dict()[name].reshape(-1) for name in names])
    assert torch.equal(flat, now)
    assert any(float(handed.change.abs().max()) > 0 for handed in hub.handed)


def test_buffer_with_infinities_is_not_exchanged() -> None:
    hub = FakeHub([task(0, (0, 16)), OVER])
    friend = Friend(hub)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
    friend.net.register_buffer("mask", mask.clone())
    friend.train()
    assert hub.form is not None
    assert "mask" not in [entry.name for entry in hub.form.layout]
    assert hub.handed[0].change.isfinite().all()
    assert torch.equal(friend.net.state_dict()["mask"], mask)


def test_schedulers_follow_samples_of_all_groups() -> None:
    hub = FakeHub([task(0, (0, 8), covered=16), task(0, (32, 40), covered=48), OVER])
    friend = Friend(hub).train()
    assert friend.run.done == 128 // BATCH
    assert friend.scheduler.last_epoch == 128 // BATCH


def test_factor_of_lease_multiplies_learning_rate_while_optimizer_steps() -> None:
    changes, rates = [], []
    for rate, factor in ((0.0625, 1.0), (0.015625, 4.0)):
        hub = FakeHub([task(0, (0, 24))._replace(rate_factor=factor), OVER])
        friend = Friend(hub)
        friend.optimizer.param_groups[0]["lr"] = rate
        friend.train()
        changes.append(hub.handed[0].change)
        rates.append(friend.optimizer.param_groups[0]["lr"] / rate)
    assert torch.equal(changes[0], changes[1])
    assert rates[0] == rates[1] == 0.5 ** (128 // BATCH), "schedulers change the script's own rate"


def test_joining_group_starts_with_hub_model_and_epoch() -> None:
    start = torch.arange(41.0)
    hub = FakeHub([task(1, (0, 8), covered=64), task(2, (0, 8), covered=72)], start)
    friend = Friend(hub).train(epochs=2)
    assert torch.equal(friend.first["0.weight"].reshape(-1), start[:16])
    order = friend.run._data.data_order.sample_order(1).tolist()  # type: ignore[union-attr]
    assert friend.seen == [order[:8]]


def test_lease_may_cross_end_of_epoch() -> None:
    both = LeasedWork((SampleRange(0, 56, 64), SampleRange(1, 0, 8)), 0, 1)
    friend = Friend(FakeHub([both, OVER])).train()
    orders = [friend.run._data.data_order.sample_order(epoch).tolist() for epoch in range(2)]  # type: ignore[union-attr]
    assert friend.seen == [orders[0][56:] + orders[1][:8], []]


def test_empty_lease_trains_nothing() -> None:
    friend = Friend(FakeHub([OVER])).train()
    assert not any(friend.seen)


@pytest.mark.parametrize("spans", [((0, 65),), ((-1, 4),), ((4, 4),), ((0, 8), (4, 12))])
def test_invalid_lease_positions_are_rejected(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(RunError, match="which do not exist"):
        Friend(FakeHub([task(0, *spans)])).train()


class _Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(8))


def test_iterable_dataset_with_hub_is_rejected() -> None:
    friend = Friend(FakeHub([OVER]))
    loader: DataLoader[Any] = DataLoader(_Endless(), batch_size=4)
    with pytest.raises(RunError, match="an iterable dataset does not have"):
        friend.run.prepare(friend.net, friend.optimizer, loader)
