"""Choice of the members that write and read parts of a checkpoint, and completeness of the parts."""

from __future__ import annotations

from barnraise.runs.checkpoint_manifest import CheckpointPart
from barnraise.training.pipeline.holdings import Transfer
from barnraise.training.pipeline.members.stage_checkpoint import (
    PartReport,
    combine_reports,
    is_complete,
    plan_readers,
    plan_writers,
    restore_failures,
)

MACHINES = ["a", "b", "b", "c"]  # of ranks 0 to 3
DISKS = [True] * 4
HOLDERS = {0: [0, 1], 1: [1, 2, 3], 2: [3, 0]}


def part(number: int, content: str = "0") -> CheckpointPart:
    return CheckpointPart(number, 10, content * 64)


def test_one_rank_of_each_machine_writes_and_the_owner_comes_first() -> None:
    plan = plan_writers(HOLDERS, MACHINES, DISKS, copies=2)
    assert plan.writers == {0: (0, 1), 1: (1, 3), 2: (3, 0)}
    assert plan.transfers == ()
    assert plan_writers(HOLDERS, MACHINES, DISKS, copies=1).writers == {0: (0,), 1: (1,), 2: (3,)}


def test_units_of_members_without_a_disk_go_to_one_that_has_one() -> None:
    plan = plan_writers(HOLDERS, MACHINES, [True, False, False, True], copies=2)
    assert plan.writers == {0: (0,), 1: (3,), 2: (3, 0)}
    plan = plan_writers({0: [1], 1: [2], 2: [1]}, MACHINES, [True, False, False, True], copies=2)
    assert plan.transfers == (Transfer(0, 1, 0), Transfer(1, 2, 3), Transfer(2, 1, 0))
    assert plan.writers == {0: (0,), 1: (3,), 2: (0,)}


def test_members_without_a_disk_get_their_units_from_all_others_in_turn() -> None:
    wanted = [{0}, {1, 2}, {0}, {2}]
    assert plan_readers(wanted, DISKS) == []
    assert plan_readers(wanted, [True, False, False, True]) == [
        Transfer(1, 0, 1),
        Transfer(2, 3, 1),
        Transfer(0, 0, 2),
    ]


def test_parts_of_all_units_make_a_checkpoint() -> None:
    plan = plan_writers(HOLDERS, MACHINES, DISKS, copies=2)
    reports = [
        PartReport((part(0), part(2))),
        PartReport((part(0), part(1)), b"skeleton", "f" * 64),
        PartReport(),
        PartReport((part(1), part(2)), b"skeleton"),
    ]
    written, signing = combine_reports(plan, reports, MACHINES)
    assert written is not None
    assert [each.number for each in written.parts] == [0, 1, 2]
    assert (written.skeleton, written.previous) == (b"skeleton", "f" * 64)
    assert signing == {"a", "b", "c"}
    assert is_complete(written, reports, MACHINES, {"a", "b"})
    assert is_complete(written, reports, MACHINES, {"b", "c"})
    assert not is_complete(written, reports, MACHINES, {"b"})
    assert written.digest != written._replace(parts=[part(0, "1"), *written.parts[1:]]).digest


def test_copy_with_other_bits_does_not_count() -> None:
    plan = plan_writers({0: [0, 1]}, MACHINES, DISKS, copies=2)
    first, second = (PartReport((part(0, content),), b"s") for content in "12")
    reports = [first, second, PartReport(), PartReport()]
    written, signing = combine_reports(plan, reports, MACHINES)
    assert written is not None
    assert written.parts == [part(0, "1")]
    assert signing == {"a"}


def test_machine_on_which_a_worker_failed_does_not_count() -> None:
    plan = plan_writers(HOLDERS, MACHINES, DISKS, copies=2)
    reports = [
        PartReport((part(0), part(2)), b"s"),
        PartReport((part(0), part(1)), b"s"),
        PartReport(failure="its disk is full"),
        PartReport((part(1), part(2)), b"s"),
    ]
    written, signing = combine_reports(plan, reports, MACHINES)
    assert written is not None
    assert signing == {"a", "c"}
    reports[3] = PartReport(failure="its disk is full")
    assert combine_reports(plan, reports, MACHINES) == (None, frozenset())


def test_checkpoint_is_restored_if_all_read_the_same_one() -> None:
    own, other = PartReport(previous="a" * 64), PartReport(previous="b" * 64)
    assert restore_failures([own, PartReport(), own]) == [], "one needs no part of it"
    assert restore_failures([own, PartReport(failure="its disk\x1b is gone"), PartReport()]) == [
        "its disk? is gone"
    ]
    assert restore_failures([own, other, own]) == ["the machines have two checkpoints of this step"]
