"""Notices that follow from two versions of a run's record."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from barnraise.agent.notifications.changes import (
    MOST_FILES_S,
    FileFacts,
    files_note,
    notices_of,
    watched_part,
)
from barnraise.agent.notifications.notice import Notice
from barnraise.agent_client.run_requests import STOPPED, RunChange
from barnraise.runs.record import (
    LeftOutNode,
    RecordedFailure,
    RunRecord,
    WorkerFailure,
    WorkerState,
    decode_record,
    encode_record,
)
from tests.unit.agent.notifications.records import H0, H1, H2, ended, facts, record, reports

ALL = record(H0, H1, H2)


def two(why: str = "h2 disappeared; training continues on 2 machines") -> RunRecord:
    """Return the next version, without h2."""
    change = RunChange(2, "running", why)
    return record(H0, H1, version=2, generation=2, why=why, changes=(change,))


def only(notices: list[Notice]) -> Notice:
    (notice,) = notices
    return notice


def test_finished_run_is_done_once() -> None:
    done = ended(0, "finished successfully")
    notice = only(notices_of(ALL, done, facts()))
    assert (notice.event, notice.state, notice.reason) == ("done", "done", "finished successfully")
    assert notice.machines == ("h0", "h1")
    assert notices_of(done, replace(done, version=10), facts()) == []


def test_failed_run_gives_its_sentence_without_output() -> None:
    failed = ended(3, "rank 1 on h1 exited with code 3", tail="password=S3CRET", node=H1, rank=1)
    notice = only(notices_of(ALL, failed, facts()))
    assert (notice.event, notice.reason) == ("failed", "rank 1 on h1 exited with code 3")
    assert "S3CRET" not in str(notice.to_json())


def test_run_that_fails_before_it_starts_is_failed() -> None:
    preparing = record(phase="preparing", generation=0)
    assert only(notices_of(preparing, ended(1, "h1: no torch"), facts())).event == "failed"


def test_stop_by_a_person_is_no_notice_but_a_script_with_its_code_fails() -> None:
    assert notices_of(ALL, ended(STOPPED, "stopped from h0"), facts()) == []
    failed = ended(STOPPED, "rank 0 on h0 exited with code 130", rank=0)
    assert only(notices_of(ALL, failed, facts())).event == "failed"


def test_end_without_a_quorum_says_so() -> None:
    notice = only(notices_of(ALL, replace(ended(0, "finished"), provisional=3), facts()))
    assert notice.reason == "finished; the other machines have not confirmed it yet"


def test_end_that_the_majority_overrules_is_told_again() -> None:
    alone = replace(ended(0, "finished"), provisional=3)
    first = only(notices_of(ALL, alone, facts()))
    failed = only(notices_of(alone, ended(1, "rank 0 on h0 exited with code 1"), facts()))
    assert (failed.event, failed.reason) == ("failed", "rank 0 on h0 exited with code 1")
    assert notices_of(alone, replace(alone, provisional=0, version=10), facts()) == [], "it is confirmed"
    later = only(notices_of(replace(ALL, version=10), replace(ended(0, "finished"), version=11), facts()))
    assert later.event == "done"
    assert len({first.key, failed.key, later.key}) == 3, "the outbox takes each of them"


@pytest.mark.parametrize(
    ("report", "since_s", "present", "note"),
    [
        ({"collected": True, "results": b"r" * 32}, 0.0, {H0}, ""),
        ({"collected": True, "results": b"r" * 32, "words": "they lack x"}, 0.0, {H0}, "h0: they lack"),
        ({"collected": True}, 0.0, {H0}, ""),
        ({"collected": True, "words": "the results stay in /x: no space"}, 0.0, {H0}, "h0: the results stay"),
        ({}, MOST_FILES_S - 1, {H0}, None),
        ({}, MOST_FILES_S, {H0}, "the files that it wrote on h0 are not all collected yet"),
        ({}, MOST_FILES_S, {H1}, "the files that it wrote are on h0, which is not here"),
        (None, 0.0, {H0}, None),
        (None, MOST_FILES_S, {H1}, "the files that it wrote are on h0, which is not here"),
    ],
)
def test_success_says_what_is_missing_of_its_files(
    report: dict[str, Any] | None, since_s: float, present: set[bytes], note: str | None
) -> None:
    state = WorkerState(rank=0, state="ended", start=1)
    known = {H0: replace(reports(H0, state)[H0], **report)} if report is not None else {}
    files = FileFacts(since_s, present, lambda node: f"h{node[0]}")
    result = files_note(ended(0, "finished successfully"), known, files)
    assert result == note or (note and result and result.startswith(note))
    assert files_note(ended(1, "failed"), known, files) == "", "a failure is told at once"


def test_notice_of_a_success_says_what_is_missing_of_its_files() -> None:
    done = only(notices_of(ALL, ended(0, "finished successfully"), facts(files="h0: no space")))
    assert done.reason == "finished successfully; h0: no space"


def test_machine_that_does_not_answer_is_gone() -> None:
    notice = only(notices_of(ALL, two(), facts(present={H0, H1})))
    assert (notice.event, notice.lost_machine, notice.reason) == (
        "machine-gone",
        "h2",
        "the machine does not answer",
    )
    assert notice.machines == ("h0", "h1")
    assert notice.title == "h2 is gone from train-k3f9"


def test_two_machines_that_are_gone_have_a_notice_each() -> None:
    alone = replace(two(), slots=two().slots[:1])
    notices = notices_of(ALL, alone, facts(present={H0}))
    assert [notice.lost_machine for notice in notices] == ["h1", "h2"]
    assert len({notice.key for notice in notices}) == 2


def test_machine_that_is_lost_again_has_another_notice() -> None:
    first = only(notices_of(ALL, two(), facts(present={H0, H1})))
    again = only(notices_of(ALL, replace(two(), generation=4), facts(present={H0, H1})))
    assert first.key != again.key


def test_clean_stop_of_a_machine_is_no_notice() -> None:
    state = WorkerState(rank=2, state="leaving", start=1)
    leaving = reports(H2, state)
    assert notices_of(ALL, two("h2 leaves; training continues on 2 machines"), facts(reports=leaving)) == []
    # Its goodbye was seen, but not the report of its worker: a group without a session.
    assert notices_of(ALL, two("h2 went away"), facts(present={H0, H1}, leaving={H2})) == []
    # It left while the agent of this machine was off.
    assert notices_of(ALL, two("h2 leaves; training continues on 2"), facts(present={H0, H1})) == []


def test_old_departure_of_a_machine_does_not_hide_its_death() -> None:
    old = replace(ALL, version=8)
    later = replace(two(), version=9, changes=(RunChange(3, "running", "h2 leaves; x"),))
    assert only(notices_of(old, later, facts(present={H0, H1}))).lost_machine == "h2"


def test_evicted_machine_is_gone_with_the_reason() -> None:
    why = "h1 and h2 cannot reach each other; training continues on 2 machines"
    notice = only(notices_of(ALL, two(why), facts()))
    assert (notice.lost_machine, notice.reason) == ("h2", "h1 and h2 cannot reach each other")


@pytest.mark.parametrize(
    ("why", "is_gone"),
    [
        ("the worker on h2 does not respond", True),
        ("the worker on h1 failed; h2 and h0 cannot reach each other", True),
        ("the worker on h1 does not respond", False),
        ("the worker on h2 failed", False),
        ("h2 has a stopped worker", False),
        ("h2 lost a worker (signal 9)", False),
    ],
)
def test_departure_for_another_reason_than_a_lost_connection_is_no_notice(why: str, is_gone: bool) -> None:
    changed = two(f"{why}; training continues on 2 machines")
    assert bool(notices_of(ALL, changed, facts())) is is_gone


def test_departure_of_a_machine_with_a_similar_name_does_not_hide_a_death() -> None:
    changed = two("h22, h21 leaves; training continues on 2 machines")
    assert only(notices_of(ALL, changed, facts(present={H0, H1}))).lost_machine == "h2"


def test_worker_that_dies_on_a_present_machine_is_no_notice() -> None:
    failure = RecordedFailure(H2, WorkerFailure(2, 0, 1, -1, 9, "output"))
    died = replace(two("h2 lost a worker (signal 9); training continues on 2"), failures=(failure,))
    assert notices_of(ALL, died, facts()) == []


def test_paused_and_finished_machines_are_no_notice() -> None:
    paused = replace(two("h2 is paused: its link is slow"), paused=(LeftOutNode(H2, "its link is slow"),))
    assert notices_of(ALL, paused, facts()) == []
    over = reports(H2, WorkerState(rank=2, state="ended", start=1))
    assert notices_of(ALL, two("h2 has finished"), facts(reports=over)) == []


def test_joining_machine_is_no_notice() -> None:
    assert notices_of(two(), replace(ALL, version=3, generation=3), facts()) == []


def test_watched_part_survives_encoding_without_output_and_spec() -> None:
    failure = RecordedFailure(H1, WorkerFailure(1, 0, 1, 1, 0, "S3CRET"))
    whole = replace(ended(1, "failed", tail="S3CRET"), failures=(failure,))
    encoded = encode_record(watched_part(whole))
    assert b"S3CRET" not in encoded
    assert decode_record(encoded) == watched_part(whole)


def test_names_and_reasons_of_other_machines_become_printable_and_short() -> None:
    def name(node: bytes) -> str:
        return "h2\x1b[2J\u202e" + "x" * 500 if node == H2 else "h"

    why = "see https://me:S3CRET@index.home.org/simple\r\n" + "y" * 5000
    cut = f"{name(H2)} and https://me:S3CRET@h1 cannot reach each other; x"
    evicted = only(notices_of(ALL, two(cut), facts(name=name)))
    failed = only(notices_of(ALL, ended(1, why), facts(name=name)))
    for notice in (evicted, failed):
        text = f"{notice.title}{notice.text}{notice.to_json()}"
        assert len(notice.title) + len(notice.text) < 1000
        assert not set("\x1b\u202e\r\n") & set(text)
        assert "S3CRET" not in text
    assert "https://…@index.home.org/simple" in failed.reason
