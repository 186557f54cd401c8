"""Load balancing keeps what each rank of a group got."""

from __future__ import annotations

from barnraise.runs.sharding import cut_micro_batches
from barnraise.training.steps.load_balancing import assign_all
from barnraise.training.steps.throughput import Throughput


def test_micro_batches_of_all_ranks_are_kept_with_completed_ones() -> None:
    throughput = Throughput()
    throughput.start_group([2.0, 1.0])
    assign_all(cut_micro_batches(0, 12, 2), {1: frozenset({0})}, throughput, 2)
    assert throughput.assigned == (4, 2)
