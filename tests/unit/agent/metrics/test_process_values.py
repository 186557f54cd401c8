"""Values of processes: counters never run backwards, and series of ended processes disappear."""

from __future__ import annotations

from barnraise.agent.metrics.process_values import SILENCE_S, ProcessTable
from barnraise.core.metrics import ProcessValues, Sample
from barnraise.core.metrics.sample import value_of

FIRST, SECOND = b"1" * 8, b"2" * 8


def values(instance: bytes, steps: float, loss: float = 0.0, failures: float = 0.0) -> ProcessValues:
    samples = [Sample("barnraise_steps_total", (), steps), Sample("barnraise_loss", (), loss)]
    if failures:
        samples.append(Sample("barnraise_collective_failures_total", ("send", "x"), failures))
    return ProcessValues("worker", instance, tuple(samples))


def steps(table: ProcessTable, now: float, worker: str = "0") -> float | None:
    return value_of(table.samples(now), "barnraise_steps_total", "spiral", worker)


def test_values_have_the_labels_of_their_worker() -> None:
    table = ProcessTable()
    table.update("spiral", 0, values(FIRST, 5), 0.0)
    table.update("spiral", 1, values(FIRST, 7), 0.0)
    assert (steps(table, 1.0), steps(table, 1.0, "1")) == (5, 7)


def test_counters_continue_when_a_process_starts_again() -> None:
    table = ProcessTable()
    table.update("spiral", 0, values(FIRST, 5, loss=2.0, failures=1), 0.0)
    table.update("spiral", 0, values(FIRST, 9, loss=1.5, failures=1), 1.0)
    table.update("spiral", 0, values(SECOND, 1, loss=1.4), 2.0)
    assert steps(table, 2.0) == 10
    table.update("spiral", 0, values(SECOND, 4, loss=1.3), 3.0)
    samples = table.samples(3.0)
    assert value_of(samples, "barnraise_steps_total", "spiral", "0") == 13
    assert value_of(samples, "barnraise_loss", "spiral", "0") == 1.3
    assert value_of(samples, "barnraise_collective_failures_total", "spiral", "0", "send", "x") == 1


def test_series_of_a_silent_process_disappear_and_come_back_as_they_were() -> None:
    table = ProcessTable()
    table.update("spiral", 0, values(FIRST, 5), 0.0)
    assert steps(table, SILENCE_S) == 5
    assert table.samples(SILENCE_S + 0.1) == []
    table.update("spiral", 0, values(SECOND, 1), 60.0)
    assert steps(table, 60.0) == 6


def test_run_that_ended_is_forgotten() -> None:
    table = ProcessTable()
    table.update("spiral", 0, values(FIRST, 5), 0.0)
    table.keep_only({"other"})
    assert table.samples(0.0) == []
    table.update("spiral", 0, values(SECOND, 1), 1.0)
    assert steps(table, 1.0) == 1


def test_worker_that_invents_processes_and_labels_stays_bounded() -> None:
    table = ProcessTable()
    for number in range(20):
        invented = tuple(
            Sample("barnraise_collective_failures_total", ("send", f"{number}-{place}"), 1.0)
            for place in range(4000)
        )
        table.update("spiral", 0, ProcessValues("worker", number.to_bytes(8, "big"), invented), 0.0)
    assert len(table.samples(0.0)) <= 4096 + 4000
