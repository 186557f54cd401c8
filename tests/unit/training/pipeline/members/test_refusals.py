"""Members that are refused, by what they report."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from barnraise.core.errors import PeerLost, WorkerRefused
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.pipeline.holdings import MemberHoldings, StageVote
from barnraise.training.pipeline.members.model_facts import ModelFacts
from barnraise.training.pipeline.members.refusals import (
    check_votes,
    judge_holdings,
    judge_samples,
    judge_votes,
    read_reports,
    refuse,
)

NAMES = ["mac", "pc", "nas", "pi"]
UNITS = 6
OURS = ModelFacts("layers", (b"",) * UNITS, 100, options=(("lr", "0.1"),))
OTHER = replace(OURS, options=(("lr", "0.2"),))
FRESH = MemberHoldings(model=OURS)
OLD = MemberHoldings(7, (0, 1), (2,), model=OURS)
VOTE = StageVote(7, 1.0, 2.0, 1, b"samples")


class Manager(SingleWorkerManager):
    """Group manager of one of several machines."""

    def __init__(self, rank: int, world: int = 3) -> None:
        super().__init__()
        self.rank, self.world = rank, world  # type: ignore[assignment]

    def name_of(self, rank: int) -> str:
        return NAMES[rank]


def test_equal_reports_refuse_no_member() -> None:
    assert judge_holdings([OLD, OLD, FRESH], NAMES, UNITS) == {}
    assert judge_holdings([FRESH, FRESH], NAMES, UNITS) == {}
    assert judge_holdings([replace(OLD, done=8), replace(OLD, is_ready=True)], NAMES, UNITS) == {}
    assert judge_votes([VOTE, replace(VOTE, loss=math.nan, squared_norm=math.inf)], NAMES) == {}
    assert judge_samples([VOTE, replace(VOTE, fingerprint=b"")], NAMES) == {}


def test_joining_worker_with_another_model_is_refused_alone() -> None:
    """Members that train decide what the model is, also if more join than train."""
    other = replace(FRESH, model=OTHER)
    assert judge_holdings([OLD, OLD, other], NAMES, UNITS) == {2: "its lr is 0.2, and that of mac is 0.1"}
    assert set(judge_holdings([OLD, other, other, other], NAMES, UNITS)) == {1, 2, 3}


def test_before_the_first_step_most_members_decide_and_of_two_the_first() -> None:
    other = replace(FRESH, model=OTHER)
    assert judge_holdings([other, FRESH, FRESH], NAMES, UNITS) == {0: "its lr is 0.2, and that of pc is 0.1"}
    assert set(judge_holdings([FRESH, other], NAMES, UNITS)) == {1}


@pytest.mark.parametrize("others", [[OLD, OLD], [OLD, replace(OLD, done=6, is_ready=True)], [OLD]])
@pytest.mark.parametrize("done", [0, 5, 9, 1 << 50])
def test_member_at_an_impossible_step_is_refused(others: list[MemberHoldings], done: int) -> None:
    liar = replace(OLD, done=done)
    rank = len(others)
    refusals = judge_holdings([*others, liar], NAMES, UNITS)
    assert refusals == {rank: f"it reports {done} steps, and mac reports 7"}


def test_step_that_did_not_reach_a_member_refuses_the_later_rank() -> None:
    assert set(judge_holdings([OLD, replace(OLD, done=8)], NAMES, UNITS)) == {1}


def test_members_that_have_only_read_checkpoints_may_be_at_any_steps() -> None:
    """A link broke while an older one was read: some have that one, and others the newer one."""
    newer, older = replace(OLD, is_restored=True), replace(OLD, done=3, is_restored=True)
    begun = replace(OLD, done=0)
    assert judge_holdings([newer, older, FRESH], NAMES, UNITS) == {}
    assert judge_holdings([begun, newer], NAMES, UNITS) == {}
    assert set(judge_holdings([OLD, OLD, older], NAMES, UNITS)) == {2}, "the others have trained"


def test_part_that_the_model_does_not_have_is_refused() -> None:
    liar = replace(OLD, others=(UNITS,))
    assert judge_holdings([OLD, liar], NAMES, UNITS) == {1: "it reports part 6 of a model that has 6 parts"}


@pytest.mark.parametrize("number", [-1.0, 1.7e308])
def test_impossible_numbers_of_a_vote_are_refused(number: float) -> None:
    assert set(judge_votes([VOTE, VOTE, replace(VOTE, squared_norm=number)], NAMES)) == {2}
    assert set(judge_votes([replace(VOTE, loss=-1.7e308), VOTE], NAMES)) == {0}


def test_votes_on_other_steps_and_samples_are_refused() -> None:
    assert judge_votes([VOTE, replace(VOTE, step=3), VOTE], NAMES) == {
        1: "it votes on step 4, and mac votes on step 8"
    }
    other = replace(VOTE, fingerprint=b"others")
    assert judge_samples([replace(VOTE, fingerprint=b""), VOTE, other], NAMES) == {
        2: "it has other samples in step 8 than pc"
    }


def test_refused_worker_ends_with_the_reason_and_the_others_take_it_for_lost() -> None:
    refuse(Manager(0), {})
    with pytest.raises(WorkerRefused, match="pc is refused by the other workers: it is odd"):
        refuse(Manager(1), {1: "it is odd"})
    for rank in (0, 2):
        with pytest.raises(PeerLost, match="pc is refused") as caught:
            refuse(Manager(rank), {1: "it is odd"})
        assert caught.value.peer == 1


def test_refusal_of_other_samples_says_what_to_do() -> None:
    votes = [VOTE, VOTE, replace(VOTE, fingerprint=b"others")]
    with pytest.raises(WorkerRefused) as caught:
        check_votes(Manager(2), votes)
    assert "the same data set" in caught.value.hint
    with pytest.raises(PeerLost):
        check_votes(Manager(0), votes)


@pytest.mark.parametrize("message", [b"", b"\xff", msgspec.msgpack.encode([1, "x"])])
def test_member_whose_report_cannot_be_read_is_refused(message: bytes) -> None:
    decoder: Any = msgspec.msgpack.Decoder(StageVote)
    good = msgspec.msgpack.encode(VOTE)
    assert read_reports(Manager(0), decoder, [good, good]) == [VOTE, VOTE]
    with pytest.raises(PeerLost, match="nas is refused") as caught:
        read_reports(Manager(0), decoder, [good, good, message])
    assert caught.value.peer == 2
    with pytest.raises(WorkerRefused, match="a report that cannot be read"):
        read_reports(Manager(2), decoder, [good, good, message])


@pytest.mark.parametrize(
    "fields",
    [
        {"speed": math.nan},
        {"speed": math.inf},
        {"block_s": math.nan},
        {"clip": -1.0},
        {"step": -1},
    ],
)
def test_numbers_of_votes_are_bounded(fields: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(replace(VOTE, **fields)), type=StageVote)


@pytest.mark.parametrize("fields", [{"factor": 1.5}, {"factor": math.nan}, {"memory_bytes": 1 << 61}])
def test_numbers_of_holdings_are_bounded(fields: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(replace(OLD, **fields)), type=MemberHoldings)
