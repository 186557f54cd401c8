"""Finished items of maps become rows: each item once, also after a death and over several maps."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.history.entries import Entry, GroupStart, StepBatch, TrainingGoal
from barnraise.history.merge import merge
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.record.map_recorder import MapRecorder


class ListSink:
    node = b""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def write(self, entries: Sequence[Entry]) -> None:
        self.entries.extend(entries)

    def close(self) -> None:
        pass


class Worker:
    """A recorder of maps, and the group that it reads."""

    def __init__(self, rank: int = 0, machines: tuple[str, ...] = ("",)) -> None:
        self.sink, self.manager = ListSink(), SingleWorkerManager()
        self.manager.rank = rank  # type: ignore[misc]
        self.manager.machines = lambda: machines  # type: ignore[method-assign]
        self.enter(1)
        self.recorder = MapRecorder(lambda: self.sink, self.manager)

    def enter(self, generation: int) -> None:
        self.manager.generation = generation  # type: ignore[misc]

    def close(self) -> list[Entry]:
        self.recorder._writer.close()
        return self.sink.entries


def _items(entries: Sequence[Entry]) -> list[int]:
    return [
        item
        for entry in merge([entries])
        if isinstance(entry, StepBatch)
        for item in range(entry.first, entry.end)
    ]


def test_items_of_two_maps_follow_each_other() -> None:
    worker = Worker()
    worker.recorder.start(5)
    for finished in (0, 2, 2, 5):
        worker.recorder.note(finished)
    worker.recorder.start(3)
    worker.recorder.note(3)
    entries = worker.close()
    assert _items(entries) == list(range(8))
    goals = [entry for entry in entries if isinstance(entry, TrainingGoal)]
    assert [(goal.total, goal.counts) for goal in goals] == [(5, "item"), (8, "item")]


def test_results_that_a_dead_worker_took_are_recorded_once() -> None:
    worker = Worker()
    worker.recorder.start(6)
    worker.recorder.note(4)
    worker.enter(2)
    worker.recorder.note(3)  # one result is lost, and its item is computed again
    worker.recorder.note(6)
    entries = worker.close()
    assert _items(entries) == list(range(6))
    starts = [(entry.generation, entry.step) for entry in entries if isinstance(entry, GroupStart)]
    assert starts == [(1, 0), (2, 3)]


def test_second_worker_of_a_machine_writes_nothing() -> None:
    worker = Worker(rank=1, machines=("mac", "mac"))
    worker.recorder.start(2)
    worker.recorder.note(2)
    assert worker.close() == []
