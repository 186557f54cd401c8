"""Maps of sessions with one worker, and with several in one process."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from barnraise.core.errors import RunError
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.mapping.encoded_values import decode_value, encode_value
from barnraise.training.mapping.mapper import Mapper, _fingerprint
from barnraise.training.mapping.result_store import ResultStore, bits_of_bitmap
from barnraise.training.session import Session
from barnraise.training.state.checkpoint_manager import CheckpointManager
from tests.unit.training.threaded_group import ThreadWorker, run_workers


def session(manager: Any) -> Session:
    return Session(manager, seed=3, unit=2, checkpoints=CheckpointManager(None, 60.0, 1))


def describe(item: int) -> dict[str, Any]:
    """Return values of many kinds, some of them random."""
    values = torch.rand(item % 5, 2).to(torch.bfloat16 if item % 2 else torch.float64)
    return {"item": item, "chance": random.random(), 7: (values, [None, True, "ä" * item, b"\0"])}


def is_same(first: Any, second: Any) -> bool:
    """Compare nested values bit by bit, with their types."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(is_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(is_same, first, second))
    return bool(first == second)


def test_map_of_one_worker_returns_results_in_order() -> None:
    run = session(SingleWorkerManager())
    assert run.map(lambda item: item * item, range(10)) == [item * item for item in range(10)]
    assert run.map(str, []) == []
    assert run.map(str.upper, {"b": 1, "a": 2}) == ["B", "A"]
    assert run.map(lambda item: item, "xy") == ["x", "y"]


def test_empty_map_reports_no_progress() -> None:
    """Workers meet by an empty map before an evaluation: "item 0 of 0" says nothing."""

    def member(worker: ThreadWorker) -> list[int]:
        totals: list[int] = []
        run = session(worker)
        progress: Any = SimpleNamespace(start=lambda exchange, total: totals.append(total))
        run._mapper._progress = progress
        assert run.map(str, []) == []
        assert run.map(str, [1, 2]) == ["1", "2"]
        return totals

    assert run_workers(2, member) == [[2], [2]]


def test_map_of_three_workers_equals_that_of_one() -> None:
    alone = session(SingleWorkerManager()).map(describe, range(40))
    computed: list[int] = []

    def noted(item: int) -> dict[str, Any]:
        computed.append(item)
        time.sleep(0.001)
        return describe(item)

    members = run_workers(3, lambda worker: session(worker).map(lambda item: (item, worker.rank), range(60)))
    assert members[0] == members[1] == members[2]
    assert [item for item, _ in members[0]] == list(range(60))
    assert {rank for _, rank in members[0]} == {0, 1, 2}, "every worker computed some"
    # Threads share the random generators, so only what does not come from them is compared.
    together = run_workers(2, lambda worker: session(worker).map(noted, range(40)))
    assert sorted(computed) == list(range(40)), "each item was computed once"
    assert [part["item"] for part in together[1]] == [part["item"] for part in alone]


def test_results_do_not_depend_on_earlier_random_numbers() -> None:
    torch.manual_seed(1)
    first = session(SingleWorkerManager()).map(describe, range(12))
    torch.manual_seed(2)
    run = session(SingleWorkerManager())
    expected_next = torch.rand(3)
    torch.manual_seed(2)
    assert is_same(run.map(describe, range(12)), first)
    assert torch.equal(torch.rand(3), expected_next), "the script's own random numbers go on as before"
    assert not is_same(run.map(describe, range(12)), first), "another map draws other numbers"


def test_large_results_reach_all_workers() -> None:
    def member(worker: ThreadWorker) -> list[torch.Tensor]:
        return session(worker).map(lambda item: torch.full((2_000_003,), item, dtype=torch.int32), range(4))

    for results in run_workers(2, member):
        assert [int(result[-1]) for result in results] == [0, 1, 2, 3]


@pytest.mark.parametrize("world", [1, 3])
def test_failed_item_is_named_on_all_workers(world: int) -> None:
    def fail(item: int) -> int:
        if item == 17:
            raise ValueError("bad sample")
        return item

    def member(worker: Any) -> str:
        run = session(worker)
        with pytest.raises(RunError, match=r"item 17 failed.*: ValueError: bad sample") as caught:
            run.map(fail, range(40))
        assert run.map(str, range(3)) == ["0", "1", "2"], "the next map works"
        return caught.value.message

    messages = run_workers(world, member) if world > 1 else [member(SingleWorkerManager())]
    assert len(set(messages)) == 1


@pytest.mark.parametrize(
    ("result", "words"),
    [(object(), "is a object, which cannot"), (1 << 70, "cannot be encoded"), ({1.5: 2}, "has the key 1.5")],
)
def test_result_that_is_no_plain_data_is_refused(result: Any, words: str) -> None:
    with pytest.raises(RunError, match=f"item 0 failed: the result of item 0.*{words}"):
        session(SingleWorkerManager()).map(lambda item: result, range(2))


def test_workers_with_different_items_are_refused() -> None:
    """A folder is listed in another order on each machine."""

    def member(worker: ThreadWorker) -> None:
        with pytest.raises(RunError, match="with different items"):
            session(worker).map(str, ["a", "b"] if worker.rank else ["b", "a"])

    run_workers(2, member)


def test_dataset_is_read_item_by_item() -> None:
    class Numbers:
        def __init__(self) -> None:
            self.reads: list[int] = []

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            self.reads.append(index)
            return index * 10

    def member(worker: ThreadWorker) -> tuple[list[int], list[int]]:
        data = Numbers()
        results = session(worker).map(lambda value: time.sleep(0.002) or value + 1, data)
        return results, data.reads

    members = run_workers(2, member)
    assert members[0][0] == [index * 10 + 1 for index in range(20)]
    assert sorted(members[0][1] + members[1][1]) == list(range(20)), "each was read by one worker"


def prepared(run: Session, epochs: int = 2) -> tuple[Any, list[Any]]:
    """Train, and compute predictions after each epoch."""
    stream = torch.Generator().manual_seed(0)  # workers are threads, which share torch's own
    x = torch.randn(24, 3, dtype=torch.float64, generator=stream)
    net = torch.nn.Linear(3, 1, dtype=torch.float64)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, generator=stream)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    net, optimizer, batches = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    predictions = []

    def predict(row: int) -> torch.Tensor:
        with torch.no_grad():
            return net(x[row])

    for _ in run.epochs(epochs):
        for batch in batches:
            for part, y in batch:
                torch.nn.functional.mse_loss(net(part), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if run.every(2):
                predictions.append(run.map(predict, range(24)))
        predictions.append(run.map(predict, range(24)))
    return net, predictions


def test_map_in_a_training_uses_the_committed_model() -> None:
    _, alone = prepared(session(SingleWorkerManager()))
    members = run_workers(2, lambda worker: prepared(session(worker)))
    assert len(alone) == 5
    for _, predictions in members:
        for own, other in zip(predictions, members[0][1], strict=True):
            assert is_same(own, other)
        for own, expected in zip(predictions, alone, strict=True):
            torch.testing.assert_close(torch.stack(own), torch.stack(expected), rtol=0, atol=1e-12)


def test_map_at_a_wrong_place_is_refused() -> None:
    run = session(SingleWorkerManager())
    with pytest.raises(RunError, match=r"run\.map was called within run\.map"):
        run.map(lambda item: run.map(str, range(2)), range(2))
    net = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    with pytest.raises(RunError, match=r"prepare was called after run\.map"):
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    run = session(SingleWorkerManager())
    net, optimizer, batches = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    refused = 0
    for batch in batches:
        for (x,) in batch:
            with pytest.raises(RunError, match="within a step"):
                run.map(str, range(2))
            refused += 1
            net(x).sum().backward()
            optimizer.step()
    assert refused


def test_results_on_the_disk_are_not_computed_again(tmp_path: Path) -> None:
    computed: list[int] = []

    def run(stop_at: int) -> list[list[int]]:
        def compute(item: int) -> int:
            if item == stop_at:
                raise KeyboardInterrupt
            computed.append(item)
            time.sleep(0.002)
            return item * 3

        def member(worker: ThreadWorker) -> list[int]:
            return Mapper(worker, 0, tmp_path if worker.rank == 0 else None).map(compute, range(30), 0)

        return run_workers(2, member)

    with pytest.raises(KeyboardInterrupt):
        run(20)
    (file,) = tmp_path.iterdir()
    store = ResultStore(30, _fingerprint(range(30)), file)
    kept = set(bits_of_bitmap(store.to_bitmap(), 30).nonzero()[0].tolist())
    assert kept
    computed.clear()
    assert run(-1) == [[item * 3 for item in range(30)]] * 2
    assert sorted([*kept, *computed]) == list(range(30))


def test_item_that_two_workers_have_computed_has_one_result(tmp_path: Path) -> None:
    """A worker was killed before it sent a result, and another one has computed the item, with other bits.

    Both results are on disks when the run restarts.
    """
    files = [tmp_path / "0", tmp_path / "1"]
    for rank, items in enumerate([range(20), range(10, 30)]):
        store = ResultStore(40, _fingerprint(range(40)), files[rank] / "1.results")
        for item in items:
            store.add(item, encode_value((item, f"disk {rank}"), "it"))
        store.close()

    def member(worker: ThreadWorker) -> list[tuple[int, str]]:
        return Mapper(worker, 0, files[worker.rank] if worker.rank < 2 else None).map(
            lambda item: (item, "new"), range(40), 0
        )

    first, *others = run_workers(3, member)
    assert first == others[0] == others[1]
    assert [words for _, words in first] == ["disk 0"] * 20 + ["disk 1"] * 10 + ["new"] * 10
    for folder in files:
        store = ResultStore(40, _fingerprint(range(40)), folder / "1.results")
        assert [decode_value(store.content(item))[1] for item in (0, 15, 25)] == [
            "disk 0",
            "disk 0",
            "disk 1",
        ]
