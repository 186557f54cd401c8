"""Sessions of several workers: different processors, iterable datasets, slow workers, little memory."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from barnraise.checkpoint.serialization import FlatState, byte_view
from barnraise.core.errors import RunError
from barnraise.runs.sharding import MicroBatch
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.recovery.out_of_memory import OutOfMemoryGuard, is_out_of_memory
from barnraise.training.session import Session
from barnraise.training.state.bitwise_sync import arithmetic_of
from barnraise.training.state.checkpoint_manager import CheckpointManager
from barnraise.training.steps.throughput import Throughput
from tests.unit.training.flat_loop import microbatches
from tests.unit.training.threaded_group import ThreadWorker, run_workers

SAMPLES, BATCH = 60, 12


class Crooked(torch.optim.SGD):
    """Optimizer that simulates a processor with its own rounding."""

    def __init__(self, parameters: Any, lr: float, error: float = 0.0) -> None:
        super().__init__(parameters, lr=lr)
        self.error = error

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1.0 + self.error)


class Numbers(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, count: int, noise: float = 0.0) -> None:
        self.count, self.noise = count, noise

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(self.count):
            x = torch.tensor([number / 50, 1.0, number % 7 / 7], dtype=torch.float64)
            yield x + self.noise * torch.rand(3, dtype=torch.float64), x.sum().reshape(1)


def rows() -> TensorDataset:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=stream, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def session(manager: Any, *, mixed: bool = False) -> Session:
    return Session(manager, seed=3, unit=2, checkpoints=CheckpointManager(None, 60.0, 1), mixed=mixed)


def model() -> torch.nn.Module:
    net = torch.nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.1, -0.2, 0.3]]))
        net.bias.zero_()
    return net


def train(run: Session, data: Any, epochs: int = 2, error: float = 0.0) -> tuple[Session, torch.nn.Module]:
    net = model()
    loader = DataLoader(data, batch_size=BATCH)
    net, optimizer, batches = run.prepare(net, Crooked(net.parameters(), 0.05, error), loader)
    for _ in run.epochs(epochs):
        for batch in batches:
            for x, y in batch:
                torch.nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return run, net


def test_mixed_group_copies_reference_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.training.steps.commit.ADOPT_EVERY", 5)  # an epoch has five steps

    def member(worker: ThreadWorker) -> tuple[Session, torch.nn.Module]:
        return train(session(worker, mixed=True), rows(), epochs=4, error=worker.rank * 1e-12)

    members = run_workers(3, member)
    weights = [net.weight for _, net in members]  # type: ignore[union-attr]
    assert all(torch.equal(weights[0], other) for other in weights[1:]), "the last commit was one of adoption"
    _, alone = train(session(SingleWorkerManager()), rows(), epochs=4)
    torch.testing.assert_close(weights[0], alone.weight, rtol=0, atol=1e-10)
    drifts = [run._step_loop._bitwise_sync.drift for run, _ in members]
    assert drifts[0] == 0.0
    assert 1e-12 < drifts[1] < drifts[2] < 1e-10


def test_unexpected_different_bits_end_run() -> None:
    with pytest.raises(RunError, match="hold different bits at step") as caught:
        run_workers(2, lambda worker: train(session(worker), rows(), error=worker.rank * 1e-3))
    assert "mixed=True" in caught.value.hint


def test_arithmetic_probe_distinguishes_processors() -> None:
    """Other torch kernels simulate another processor; they round differently."""
    script = (
        "import torch\nfrom barnraise.training.state.bitwise_sync import arithmetic_of\n"
        "parameter = torch.nn.Parameter(torch.zeros(3))\n"
        "print(arithmetic_of([torch.optim.AdamW([parameter], lr=1e-3)]).hex())"
    )

    def probe(**variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    parameter = torch.nn.Parameter(torch.zeros(3))
    here = arithmetic_of([torch.optim.AdamW([parameter], lr=1e-3)]).hex()
    assert probe() == here
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert probe(ATEN_CPU_CAPABILITY="default") != here


@pytest.mark.parametrize(("system", "processor"), [("win32", "x86_64"), ("linux", "aarch64")])
def test_arithmetic_differs_between_builds(
    monkeypatch: pytest.MonkeyPatch, system: str, processor: str
) -> None:
    """With SGD, the numbers of the probe are equal on Linux and Windows, and those of a training are not."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])]
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    here = arithmetic_of(optimizers)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.setattr(sys, "platform", system)
    assert arithmetic_of(optimizers) != here
    monkeypatch.undo()


def test_iterable_dataset_read_by_all_counts_once() -> None:
    """The last batch of an epoch is smaller."""
    alone, expected = train(session(SingleWorkerManager()), Numbers(31))
    assert alone.done == 6
    for run, net in run_workers(3, lambda worker: train(session(worker), Numbers(31))):
        assert run.done == 6
        for parameter, expected_parameter in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected_parameter, rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [0, 1])
def test_iterable_random_numbers_depend_on_item(workers: int) -> None:
    def seen(noise: int) -> list[float]:
        loader = DataLoader(Numbers(31, 0.1), batch_size=BATCH, num_workers=workers)
        run, net = session(SingleWorkerManager()), model()
        net, optimizer, batches = run.prepare(net, Crooked(net.parameters(), 0.05), loader)
        values = []
        for _ in run.epochs(2):
            for batch in batches:
                for x, _ in batch:
                    values += x[:, 0].tolist()
                    torch.rand(noise)  # numbers that the script draws
                    net(x).sum().backward()
                    optimizer.step()
        return values

    first = seen(1)
    assert first == seen(3)
    assert len(first) == 2 * 31
    assert first[:31] != first[31:], "another epoch has other noise"


def test_iterables_of_different_length_are_reported() -> None:
    with pytest.raises(RunError, match="samples in step 2") as caught:
        run_workers(2, lambda worker: train(session(worker), Numbers(31 + worker.rank)))
    assert "same items on every machine" in caught.value.hint


def test_joining_worker_skips_items_already_trained() -> None:
    whole, expected = train(session(SingleWorkerManager()), Numbers(48), epochs=1)
    late = session(SingleWorkerManager())
    net = model()
    loader = DataLoader(Numbers(48), batch_size=BATCH)
    _, optimizer, batches = late.prepare(net, Crooked(net.parameters(), 0.05), loader)
    half = session(SingleWorkerManager())
    other = model()
    _, first, earlier = half.prepare(other, Crooked(other.parameters(), 0.05), loader)
    for x, y in microbatches(earlier):
        torch.nn.functional.mse_loss(other(x), y).backward()
        first.step()
        first.zero_grad()
        if half.done == 2:
            break
    late._step_loop.done = late._state.load(half._state.flatten(half.done))
    late._step_loop._start_next_step()
    for batch in batches:
        for x, y in batch:
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert late.done == whole.done == 4
    assert torch.equal(net.weight, expected.weight)  # type: ignore[arg-type]


class Counted(Numbers):
    """Iterable dataset that counts the items read."""

    read = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for item in super().__iter__():
            self.read += 1
            yield item


def test_iterable_during_live_recovery_is_read_ahead(
    caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """Reading happens before the other workers wait for this one."""
    monkeypatch.setattr("barnraise.training.data.iterable._REPORT_S", -1.0)
    half = session(SingleWorkerManager())
    other = model()
    loader = DataLoader(Numbers(48), batch_size=BATCH)
    _, first, earlier = half.prepare(other, Crooked(other.parameters(), 0.05), loader)
    results: list[Any] = []
    half._step_loop._recovery.note_commit = lambda result: results.append(result())  # type: ignore[method-assign]
    snapshot = None
    for x, y in microbatches(earlier):
        torch.nn.functional.mse_loss(other(x), y).backward()
        first.step()
        first.zero_grad()
        if half.done == 2 and snapshot is None:
            parts = half._state.flatten(2)
            snapshot = FlatState(parts.skeleton, [tensor.clone() for tensor in parts.tensors])
        if half.done == 3:
            break
    late, net, items = session(SingleWorkerManager()), model(), Counted(48)
    late.prepare(net, Crooked(net.parameters(), 0.05), DataLoader(items, batch_size=BATCH))
    assert snapshot is not None
    assert late._step_loop._load_state(snapshot) == 2
    assert items.read == 3 * BATCH, "with those of the next step"
    assert "catch up with the training: 23 of 24 items" in caplog.text
    *_, last = results
    late._step_loop._replay(
        msgspec.structs.replace(last, tensors=[byte_view(tensor) for tensor in last.tensors])
    )
    assert items.read == 4 * BATCH
    assert torch.equal(net.weight, other.weight)  # type: ignore[arg-type]


def test_too_slow_rank_gets_nothing_and_is_retried() -> None:
    pace = Throughput()
    pace.start_group([10.0, 10.0, 0.1])
    assert pace.ranks_to_retry(3) == frozenset()
    assert pace.note_assignment([4, 4, 0]) == [2], "it is reported once"
    tried = []
    for commit in range(200):
        due = pace.ranks_to_retry(3)
        if due:
            tried.append(commit)
        assert pace.note_assignment([4, 4, 1 if due else 0]) == []
    assert [later - earlier for earlier, later in pairwise(tried)] == [33, 65]


def test_speeds_of_idle_ranks_are_kept() -> None:
    pace = Throughput()
    assert pace.speed() == 0.0, "the speed is not known"
    pace.start_group([])
    pace.update([0.0, 3.0], 0)
    assert pace.speeds == []
    pace.update([2.0, 3.0], 0)
    assert pace.speeds == [2.0, 3.0]
    pace.update([0.0, 5.0], 0)
    assert pace.speeds == [2.0, 4.0], "a rank that computed nothing keeps its speed"


def test_microbatch_in_parts_gives_same_sum(tmp_path: Path) -> None:
    """Batch norm statistics are the mean of the parts' statistics."""
    memory = OutOfMemoryGuard(tmp_path / "run" / "parts-0")
    assert memory.halve(4)
    assert memory.halve(4)
    assert not memory.halve(4), "one sample cannot be split"
    assert OutOfMemoryGuard(tmp_path / "run" / "parts-0").parts == 4
    assert [piece.span[1:] for piece in memory.split(MicroBatch(3, 10, 13))] == [
        (10, 11),
        (11, 12),
        (12, 13),
    ]
    _, whole = train(session(SingleWorkerManager()), rows())
    run = session(SingleWorkerManager())
    run._oom_guard = OutOfMemoryGuard(tmp_path / "run" / "parts-0")
    _, split = train(run, rows())
    torch.testing.assert_close(split.weight, whole.weight, rtol=0, atol=1e-12)


SCRIPT = """
import torch, barnraise
from torch.utils.data import DataLoader, TensorDataset
net = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
run = barnraise.init(unit=8)
loader = DataLoader(TensorDataset(torch.arange(32.0)), batch_size=16)
_, optimizer, batches = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
for batch in batches:
    for (x,) in batch:
        if len(x) > 3:
            raise torch.OutOfMemoryError(f"no memory for {len(x)}")
        net(x[:, None]).sum().backward()
        optimizer.step()
print("done", run.done, int(net[0].num_batches_tracked))
"""


def test_out_of_memory_restarts_with_smaller_parts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "BARNRAISE_CHECKPOINTS": str(tmp_path / "run" / "checkpoints")}
    ends = [
        subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
        for _ in range(3)
    ]
    assert [end.returncode for end in ends] == [-signal.SIGKILL, -signal.SIGKILL, 0], ends[-1].stderr
    assert "restarts with at most 4" in ends[0].stderr
    assert "restarts with at most 2" in ends[1].stderr
    assert ends[2].stdout.split() == ["done", "2", "4"], "a unit counts as one for the batch norm"


@pytest.mark.parametrize("place", ["0", "1"])
def test_model_is_saved_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The first worker of each machine saves; rank 0 always does."""
    monkeypatch.setenv("LOCAL_RANK", place)

    def member(worker: ThreadWorker) -> bytes:
        run, _ = train(session(worker), rows(), epochs=1)
        path = tmp_path / f"{worker.rank}.safetensors"
        run.save(path)
        return path.read_bytes() if path.exists() else b""

    first, second = run_workers(2, member)
    assert first
    assert second == (first if place == "0" else b"")
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors"}


def test_main_memory_error_counts_as_out_of_memory() -> None:
    words = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
    )
    assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_assignment_that_a_record_counts_is_what_each_worker_computes() -> None:
    def member(worker: ThreadWorker) -> list[tuple[int, tuple[int, ...]]]:
        noted: list[tuple[int, tuple[int, ...]]] = []
        run, net = session(worker), model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        net, optimizer, batches = run.prepare(net, optimizer, DataLoader(rows(), batch_size=BATCH))
        run.on_commit(lambda run: noted.append((run._step_loop.computed_samples, run._throughput.assigned)))
        for _ in run.epochs(2):
            for batch in batches:
                for x, y in batch:
                    torch.nn.functional.mse_loss(net(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return noted

    for rank, noted in enumerate(run_workers(3, member)):
        for (_, assigned), (computed, _) in pairwise(noted):
            assert (sum(assigned), computed) == (BATCH // 2, 2 * assigned[rank])
