"""Counter of a machine's part in the micro-batches."""

from __future__ import annotations

from barnraise.training.record.share_counter import ShareCounter


def test_part_is_of_the_steps_since_the_last_reading() -> None:
    counter = ShareCounter()
    assert counter.take() is None
    counter.add(("a", "b", "b"), "b", (4, 3, 1))
    counter.add(("a", "b"), "b", (0, 8))
    assert counter.take() == 0.75
    counter.add(("a", "b"), "b", (8, 0))
    assert counter.take() == 0.0
    counter.add(("a", "b"), "b", (1, 2, 3))  # of another group
    assert counter.take() is None
