"""Check of commit votes: contradictions are rejected with a message."""

from __future__ import annotations

import msgspec
import pytest

from barnraise.core.errors import ProtocolError, RunError
from barnraise.runs.sharding import MicroBatch, coverage_sum
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.steps.commit_vote import CommitVote, check_votes
from barnraise.training.steps.load_balancing import assign_own
from barnraise.training.steps.throughput import Throughput


def _words(*units: set[int], samples: int = 8) -> list[bytes]:
    words = [
        CommitVote(3, b"d", 1, 1.0, {}, samples=samples, microbatches=coverage_sum(some)) for some in units
    ]
    return [msgspec.msgpack.encode(word) for word in words]


def test_votes_with_each_microbatch_once_are_accepted() -> None:
    votes = check_votes(_words({0, 2}, {1, 3}), step=3, microbatches=4, mixed=False)
    assert [vote.samples for vote in votes] == [8, 8]


@pytest.mark.parametrize("units", [[{0, 2}, {1}], [{0, 2}, {1, 2, 3}], [{0, 1}, {2, 3, 4}], [set(), set()]])
def test_votes_with_missing_or_doubled_microbatch_are_rejected(units: list[set[int]]) -> None:
    with pytest.raises(RunError, match="counted exactly once"):
        check_votes(_words(*units), step=3, microbatches=4, mixed=False)


def test_votes_at_different_steps_are_rejected() -> None:
    with pytest.raises(RunError, match="different steps"):
        check_votes(_words({0}), step=4, microbatches=1, mixed=False)


@pytest.mark.parametrize("number", [-1, 4])
def test_assignment_with_unknown_microbatch_is_rejected(number: int) -> None:
    units = tuple(MicroBatch(index, index, index + 1) for index in range(4))
    with pytest.raises(ProtocolError, match="does not have"):
        assign_own(units, {1: frozenset({number})}, Throughput(), SingleWorkerManager())
