"""Fabric in a session of one worker; test_fabric_groups.py has several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from barnraise.core.errors import RunError
from barnraise.integrations.fabric import BarnraiseStrategy
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.integrations.fabric_training import BATCH, SAMPLES, data, model, train

lightning_fabric = pytest.importorskip("lightning_fabric")
Fabric = lightning_fabric.Fabric

# float32: a session adds the gradients of its micro-batches in another order.
CLOSE = {"rel": 1e-5, "abs": 1e-6}


def session() -> Session:
    return Session(SingleWorkerManager(), seed=0, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))


def plain() -> Any:
    return Fabric(accelerator="cpu", devices=1)


def in_session(**options: Any) -> Any:
    return Fabric(accelerator="cpu", strategy=BarnraiseStrategy(session(), **options))


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_is_that_of_plain_fabric(accumulate: int, max_norm: float | None) -> None:
    fabric = in_session(accumulate=accumulate, max_norm=max_norm)
    trained = train(fabric, accumulate=accumulate, max_norm=max_norm)
    expected = train(plain(), accumulate=accumulate, max_norm=max_norm)
    assert trained.parameters == pytest.approx(expected.parameters, **CLOSE)
    assert trained.iterations == 3 * SAMPLES // 2, "micro-batches"
    assert fabric.strategy.run.step == 3 * SAMPLES // BATCH


def test_clipping_and_scheduler_matter() -> None:
    """Otherwise the comparisons above would show nothing."""
    free, clipped = train(plain()).parameters, train(plain(), max_norm=0.05).parameters
    assert free != pytest.approx(clipped, **CLOSE)


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_both_packages_accept_strategy(package: str) -> None:
    fabric = pytest.importorskip(package).Fabric(accelerator="cpu", strategy=BarnraiseStrategy(session()))
    expected = train(plain()).parameters
    assert train(fabric).parameters == pytest.approx(expected, **CLOSE)


def test_default_session_has_seed_of_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    strategy = BarnraiseStrategy()
    trained = train(Fabric(accelerator="cpu", strategy=strategy), shuffle=True)
    assert strategy.run._seed == 7
    assert trained.iterations == 3 * (SAMPLES // BATCH) * 8, "micro-batches of an eighth of a batch"


def test_accumulation_needs_memory_of_one_batch_only() -> None:
    strategy = BarnraiseStrategy(accumulate=16)
    seen = []
    train(
        Fabric(accelerator="cpu", strategy=strategy),
        accumulate=16,
        on_iteration=lambda count: seen.append(strategy.run._current.span.size),  # type: ignore[union-attr]
    )
    assert set(seen) == {BATCH // 16}


def test_bfloat16_trains_to_similar_parameters() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed", strategy=BarnraiseStrategy(session()))
    expected = train(plain()).parameters
    assert train(fabric).parameters == pytest.approx(expected, abs=0.02)


def test_half_precision_scales_the_loss_for_all() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # no step is skipped
    plugins = pytest.importorskip("lightning_fabric.plugins")
    precision = plugins.MixedPrecision("16-mixed", "cpu", scaler)
    fabric = Fabric(
        accelerator="cpu", plugins=precision, strategy=BarnraiseStrategy(session(), max_norm=0.05)
    )
    trained = train(fabric, max_norm=0.05)
    assert trained.parameters == pytest.approx(train(plain(), max_norm=0.05).parameters, abs=0.02)
    assert scaler.get_scale() == 256.0


class Pair(nn.Module):
    """Two layers, each of which has its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


def test_two_optimizers_of_one_module_step_together() -> None:
    def trained(fabric: Any) -> list[float]:
        fabric.launch()
        pair = Pair()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (pair.first, pair.second)]
        net, *optimizers = fabric.setup(pair, *optimizers)
        for inputs, targets in fabric.setup_dataloaders(DataLoader(data(), batch_size=BATCH)):
            fabric.backward(nn.functional.mse_loss(net(inputs), targets))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [value for parameter in pair.parameters() for value in parameter.flatten().tolist()]

    assert trained(in_session()) == pytest.approx(trained(plain()), **CLOSE)


def test_worker_that_joined_late_writes_nothing_for_earlier_epochs(tmp_path: Path) -> None:
    fabric, net, optimizer, loader = ready()
    for _ in range(3):
        for inputs, targets in loader:
            fabric.backward(nn.functional.mse_loss(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    fabric.strategy.run.next_epoch = 0  # as in a worker that joins after three epochs
    for epoch in range(3):
        assert list(loader) == []
        fabric.save(tmp_path / f"{epoch}.ckpt", {"model": net})
        assert (tmp_path / f"{epoch}.ckpt").exists() == (epoch == 2)


def test_file_saved_within_a_step_has_the_committed_model(tmp_path: Path) -> None:
    fabric, net, optimizer, loader = ready()
    first = [parameter.detach().clone() for parameter in net.parameters()]
    for count, (inputs, targets) in enumerate(loader):
        fabric.backward(nn.functional.mse_loss(net(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        fabric.save(tmp_path / f"{count}.ckpt", {"model": net})
    units = BATCH // 2
    for count in (units - 2, units - 1):
        written = torch.load(tmp_path / f"{count}.ckpt", weights_only=True)["model"].values()
        is_unchanged = all(torch.equal(value, old) for value, old in zip(written, first, strict=True))
        assert is_unchanged == (count == units - 2), "a step is committed by its last micro-batch"


def test_other_loaders_are_not_divided() -> None:
    fabric = in_session()
    fabric.launch()
    train_loader, test_loader = fabric.setup_dataloaders(
        DataLoader(data(), batch_size=BATCH), DataLoader(data(), batch_size=BATCH)
    )
    assert [len(inputs) for inputs, _ in test_loader] == [BATCH] * (SAMPLES // BATCH)
    assert len(train_loader) == len(test_loader) == SAMPLES // BATCH
    assert train_loader.batch_size == BATCH


def test_saved_file_is_loaded_by_another_training(tmp_path: Path) -> None:
    fabric, saved = in_session(), tmp_path / "folder" / "state.ckpt"

    def save(net: Any, optimizer: Any) -> None:
        fabric.save(saved, {"model": net, "optimizer": optimizer, "epoch": 3})

    trained = train(fabric, after_epoch=save)
    other = in_session()
    other.launch()
    net, optimizer = other.setup(net := model(), torch.optim.AdamW(net.parameters()))
    remainder = other.load(saved, {"model": net, "optimizer": optimizer})
    assert remainder == {"epoch": 3}
    values = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    assert values.tolist() == trained.parameters
    loader = other.setup_dataloaders(DataLoader(data(), batch_size=BATCH))
    with pytest.raises(RunError, match="epoch of a worker that joins late"):
        next(iter(loader))
    assert list(other.strategy.epochs(2)) == [0, 1]


def test_collectives_after_an_epoch_need_epochs_of_session() -> None:
    fabric = in_session()

    def reduce(net: Any, optimizer: Any) -> None:
        assert fabric.all_reduce(torch.tensor([2.0, 4.0]), reduce_op="sum").tolist() == [2.0, 4.0]

    with pytest.raises(RunError, match=r"fabric\.all_reduce needs to know the epoch"):
        train(fabric, after_epoch=reduce)
    fabric = in_session()
    values: list[Any] = []
    train(
        fabric,
        lambda count: fabric.strategy.epochs(count),
        after_epoch=lambda net, optimizer: values.append(fabric.all_gather(torch.ones(2))),
    )
    assert [value.tolist() for value in values] == [[1.0, 1.0]] * 3
    fabric.barrier()


def ready(**options: Any) -> tuple[Any, Any, Any, Any]:
    """Return Fabric, a model, an optimizer and a loader, set up."""
    fabric = in_session(**options)
    fabric.launch()
    net = model()
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    return fabric, net, optimizer, fabric.setup_dataloaders(DataLoader(data(), batch_size=BATCH))


def in_first_iteration(act: Callable[[Any, Any, Any], None], **options: Any) -> None:
    fabric, net, optimizer, loader = ready(**options)
    for inputs, targets in loader:
        fabric.backward(nn.functional.mse_loss(net(inputs), targets))
        act(fabric, net, optimizer)


def set_rate(fabric: Any, net: Any, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.5


def schedule_late(fabric: Any, net: Any, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda fabric, net, optimizer: None, r"without optimizer\.step\(\)"),
        (
            lambda fabric, net, optimizer: fabric.all_reduce(torch.ones(1)),
            "all_reduce was called in the loop",
        ),
        (
            lambda fabric, net, optimizer: fabric.all_gather(torch.ones(1)),
            "all_gather was called in the loop",
        ),
        (lambda fabric, net, optimizer: fabric.barrier(), "barrier was called in the loop"),
        (lambda fabric, net, optimizer: fabric.broadcast("name"), r"fabric\.broadcast"),
        (lambda fabric, net, optimizer: fabric.load("file"), "after the training had begun"),
        (
            lambda fabric, net, optimizer: fabric.clip_gradients(net, optimizer, max_norm=2.0),
            "max_norm=2, and the strategy has none",
        ),
        (
            lambda fabric, net, optimizer: fabric.clip_gradients(net, optimizer, clip_val=2.0),
            r"clip_gradients\(clip_val",
        ),
        (
            lambda fabric, net, optimizer: fabric.clip_gradients(net, optimizer, max_norm=2.0, norm_type=1.0),
            "norm_type=1",
        ),
        (lambda fabric, net, optimizer: optimizer.step(lambda: None), "closure"),
        (
            lambda fabric, net, optimizer: fabric.setup(
                nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))])
            ),
            "after the training had begun",
        ),
        (set_rate, "changed the learning rate"),
        (schedule_late, "changed the learning rate"),
    ],
)
def test_calls_without_meaning_in_the_loop_are_rejected(act: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        in_first_iteration(act)


def test_calls_outside_the_loop_are_rejected() -> None:
    fabric, net, optimizer, _ = ready()
    inputs, targets = data()[:4]
    with pytest.raises(RunError, match=r"fabric\.backward was called outside"):
        fabric.backward(nn.functional.mse_loss(net(inputs), targets))
    with pytest.raises(RunError, match=r"optimizer\.step\(\) was called outside"):
        optimizer.step()
    with pytest.raises(RunError, match="before the workers have met"):
        fabric.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):  # Lightning's own check
        nn.functional.mse_loss(net(inputs), targets).backward()
    with pytest.raises(RunError, match="without accumulation"), fabric.no_backward_sync(net):
        pass
    fabric.barrier()


def test_setups_that_cannot_train_are_rejected() -> None:
    fabric = in_session()
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=BATCH))
    with pytest.raises(RunError, match="without an optimizer"):
        next(iter(loader))
    fabric.setup(first := nn.Linear(4, 1), torch.optim.SGD(first.parameters()))
    fabric.setup(second := nn.Linear(4, 1), torch.optim.SGD(second.parameters()))
    with pytest.raises(RunError, match="several modules"):
        next(iter(loader))
    fabric, *_ = ready(accumulate=4)
    with pytest.raises(RunError, match="no multiple of 4 accumulated batches"):
        list(fabric.strategy.epochs(1))
    fabric = in_session()
    fabric.launch()
    fabric.setup(first := nn.Linear(4, 1), torch.optim.SGD(first.parameters()))
    with pytest.raises(RunError, match="without a loader"):
        list(fabric.strategy.epochs(1))


def test_launchers_and_devices_of_fabric_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"devices": 2}, {"num_nodes": 2}):
        with pytest.raises(RunError, match=next(iter(options))):
            Fabric(accelerator="cpu", strategy=BarnraiseStrategy(), **options).launch()
    monkeypatch.setenv("BARNRAISE_DEVICE", "meta")
    fabric = Fabric(accelerator="cpu", strategy=BarnraiseStrategy())
    assert fabric.device == torch.device("cpu"), "as the script says"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="started 2 processes"):
        fabric.launch()


def test_ranks_before_the_training_are_those_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_LAUNCHED", "1")
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "GROUP_RANK": 2}.items():
        monkeypatch.setenv(name, str(value))
    fabric = Fabric(accelerator="cpu", strategy=BarnraiseStrategy(session()))
    assert (fabric.global_rank, fabric.world_size, fabric.local_rank, fabric.node_rank) == (3, 4, 1, 2)
    assert not fabric.is_global_zero
    monkeypatch.delenv("BARNRAISE_LAUNCHED")
    monkeypatch.delenv("WORLD_SIZE")
    train(fabric)
    assert (fabric.global_rank, fabric.world_size) == (0, 1), "those of the group"


def test_dataset_of_numbers_is_read_once() -> None:
    seen: list[float] = []
    fabric = in_session()
    fabric.launch()
    net = nn.Linear(1, 1)
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    numbers = TensorDataset(torch.arange(40.0).unsqueeze(1))
    for (inputs,) in fabric.setup_dataloaders(DataLoader(numbers, batch_size=16, shuffle=True)):
        seen += inputs.flatten().tolist()
        fabric.backward(net(inputs).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(seen) == list(range(40))
