"""Records of jobs that a quorum has on disk."""

from __future__ import annotations

from barnraise.runs.queue.disk_quorum import DIGEST_BYTES, DiskQuorum, record_digest
from barnraise.runs.queue.job import changed_job
from tests.unit.runs.queue.test_job import job

A, B, C, GUEST = (bytes([number]) * 32 for number in (1, 2, 3, 4))
OLD = job(1).record
NEW = changed_job(OLD, priority=1)


def test_record_of_one_disk_is_unsaved_until_most_machines_have_it() -> None:
    disks = DiskQuorum(B)
    disks.set_voters((A, B, C))
    disks.change(1, NEW)
    assert disks.unsaved == {1}
    assert disks.missing(1) == (A, C)
    assert not disks.confirm(1, record_digest(OLD), C), "an older record does not count"
    assert disks.confirm(1, record_digest(NEW), GUEST)
    assert disks.unsaved == {1}, "a machine without a vote does not count"
    assert disks.confirm(1, record_digest(NEW), C)
    assert disks.unsaved == set()
    disks.change(1, changed_job(NEW, priority=2))
    assert disks.unsaved == {1}, "the newest record counts"


def test_half_of_the_machines_is_a_quorum_only_with_the_most_senior_one() -> None:
    disks = DiskQuorum(B)
    disks.change(1, OLD)
    disks.set_voters((B, A))
    assert disks.unsaved == set()
    disks.set_voters((A, B))
    assert disks.unsaved == {1}
    disks.confirm(1, record_digest(OLD), A)
    assert disks.unsaved == set()


def test_unknown_and_forgotten_jobs_are_never_confirmed() -> None:
    disks = DiskQuorum(A)
    disks.set_voters((A, B, C))
    assert not disks.confirm(1, b"", B)
    disks.change(1, OLD)
    assert len(disks.digest(1)) == DIGEST_BYTES
    assert not disks.confirm(1, b"", B)
    disks.forget(1)
    assert disks.unsaved == set()
    assert disks.digest(1) == b""
    assert not disks.contradict(1, b"order", B)
    disks.change(2, OLD)
    disks.clear()
    assert disks.unsaved == set()
    assert disks.digest(2) == b""


def test_another_job_with_the_same_number_needs_a_quorum_for_itself() -> None:
    disks = DiskQuorum(A)
    disks.set_voters((A, B, C))
    disks.change(1, OLD)
    assert not disks.contradict(1, b"one", B)
    assert not disks.contradict(1, b"two", C), "B and C have different jobs"
    assert not disks.contradict(1, b"two", GUEST)
    assert disks.contradict(1, b"two", B)
    disks.confirm(1, record_digest(OLD), B)
    assert not disks.contradict(1, b"two", C), "B has the job of this machine by now"
