"""The outbox of notices: exactly one for each event and target, also after a restart."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from barnraise.agent.notifications.outbox import FILE_NAME, MAX_OF_RUN, Outbox
from barnraise.agent_client.notifications.targets import EVENTS, DesktopTarget, NtfyTarget, WebhookTarget
from barnraise.core.errors import AgentError, BarnraiseError
from tests.unit.agent.notifications.records import H0, record
from tests.unit.agent.notifications.test_notice import notice

HOOK = WebhookTarget("https://home.org/S3CRET-OF-THE-URL")
RUN = "train-k3f9"


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    made = Outbox(tmp_path)
    yield made
    made.close()


def again(outbox: Outbox, folder: Path) -> Outbox:
    """Open the outbox as after a restart of the agent."""
    outbox.close()
    return Outbox(folder)


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Let the disk take nothing from the outbox: another program keeps the file locked."""
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.rollback()


def test_event_is_queued_once_for_each_target_that_wants_it(outbox: Outbox) -> None:
    outbox.add(HOOK, EVENTS, {})
    outbox.add(DesktopTarget(), ("done",), {})
    assert outbox.save(RUN, record(H0), [notice()])
    assert not outbox.save(RUN, record(H0), [notice(at=5.0)])
    assert [(each.target, each.notice.at) for each in outbox.waiting()] == [("webhook", 1000.0)]


def test_delivered_notice_is_not_queued_again_after_a_restart(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {})
    outbox.save(RUN, record(H0), [notice()])
    outbox.note_delivered(outbox.waiting()[0], 7.0)
    later = again(outbox, tmp_path)
    assert later.waiting() == []
    assert not later.save(RUN, record(H0), [notice()])
    assert later.watched(RUN) == record(H0)
    (row,) = later.table()
    assert (row.delivered, row.delivered_at, row.waiting, row.failure) == (1, 7.0, 0, "")
    later.close()


def test_waiting_notice_survives_a_restart_with_its_attempts(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {})
    outbox.save(RUN, record(H0), [notice()])
    outbox.note_failed(outbox.waiting()[0], "the server answered 503", 7.0, gives_up=False)
    later = again(outbox, tmp_path)
    (waiting,) = later.waiting()
    assert (waiting.notice, waiting.attempts) == (notice(), 1)
    (row,) = later.table()
    assert (row.waiting, row.dropped, row.failure, row.failed_at) == (1, 0, "the server answered 503", 7.0)
    later.note_failed(waiting, "the server answered 404", 8.0, gives_up=True)
    assert later.waiting() == []
    (row,) = later.table()
    assert (row.waiting, row.dropped, row.failure) == (0, 1, "the server answered 404")
    later.close()


def test_success_clears_the_last_failure(outbox: Outbox) -> None:
    outbox.add(HOOK, EVENTS, {})
    outbox.save(RUN, None, [notice(key="a"), notice(key="b")])
    first, second = outbox.waiting()
    outbox.note_failed(first, "the server answered 404", 7.0, gives_up=True)
    outbox.note_delivered(second, 8.0)
    (row,) = outbox.table()
    assert (row.failure, row.dropped, row.delivered) == ("", 0, 1)


def test_new_target_watches_active_runs_and_gets_no_earlier_notice(outbox: Outbox) -> None:
    outbox.add(HOOK, EVENTS, {RUN: record(H0)})
    assert outbox.watched(RUN) == record(H0)
    outbox.save(RUN, replace(record(H0), version=5), [notice()])
    outbox.add(DesktopTarget(), EVENTS, {RUN: record(H0)})
    assert [each.target for each in outbox.waiting()] == ["webhook"]
    watched = outbox.watched(RUN)
    assert watched is not None
    assert watched.version == 5


def test_same_target_is_added_once_and_names_are_used_again(outbox: Outbox) -> None:
    assert outbox.add(NtfyTarget("https://ntfy.sh/a"), EVENTS, {}) == "ntfy"
    assert outbox.add(NtfyTarget("https://ntfy.sh/b"), EVENTS, {}) == "ntfy-2"
    with pytest.raises(AgentError, match="ntfy-2 is this target already"):
        outbox.add(NtfyTarget("https://ntfy.sh/b"), ("done",), {})
    outbox.remove("ntfy")
    assert outbox.add(NtfyTarget("https://ntfy.sh/c"), EVENTS, {}) == "ntfy"


def test_number_of_targets_is_bounded(outbox: Outbox) -> None:
    for number in range(32):
        outbox.add(NtfyTarget(f"https://ntfy.sh/{number}"), EVENTS, {})
    with pytest.raises(AgentError, match="32 targets"):
        outbox.add(HOOK, EVENTS, {})


def test_removed_target_leaves_no_secret_and_no_notice(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {RUN: record(H0)})
    outbox.save(RUN, record(H0), [notice()])
    assert b"S3CRET-OF-THE-URL" in _content(tmp_path)
    outbox.remove("webhook")
    assert b"S3CRET-OF-THE-URL" not in _content(tmp_path)
    assert (outbox.waiting(), outbox.watched(RUN), outbox.has_targets) == ([], None, False)
    with pytest.raises(AgentError, match="no target webhook"):
        outbox.remove("webhook")


@pytest.mark.skipif(sys.platform == "win32", reason="modes of files")
def test_file_is_for_its_owner_alone(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {})
    modes = {stat.S_IMODE(os.stat(path).st_mode) for path in tmp_path.glob(f"{FILE_NAME}*")}
    assert modes == {0o600}


def test_machine_that_comes_and_goes_sends_a_bounded_number(outbox: Outbox) -> None:
    outbox.add(HOOK, EVENTS, {})
    for number in range(MAX_OF_RUN + 50):
        outbox.save(RUN, None, [notice(event="machine-gone", key=f"gone {number}")])
    assert len(outbox.waiting()) == MAX_OF_RUN
    assert outbox.save(RUN, None, [notice()])  # the end of the run is told in any case


def test_runs_that_are_forgotten_leave_only_notices_that_wait(outbox: Outbox) -> None:
    outbox.add(HOOK, EVENTS, {})
    for run in ("old-1", "old-2", RUN):
        outbox.save(run, record(H0), [notice(run=run)])
    outbox.note_delivered(outbox.waiting()[0], 1.0)
    outbox.keep_only([RUN])
    assert [outbox.watched(run) is not None for run in ("old-1", "old-2", RUN)] == [False, False, True]
    assert [each.notice.run for each in outbox.waiting()] == ["old-2", RUN]


def test_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 100)
    os.chmod(tmp_path / FILE_NAME, 0o600)
    with pytest.raises(AgentError, match=FILE_NAME):
        Outbox(tmp_path)


def test_row_that_another_version_wrote_is_an_error_of_ours(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {})
    with sqlite3.connect(tmp_path / FILE_NAME) as base:
        base.execute("UPDATE target SET body = x'00'")
    base.close()
    later = again(outbox, tmp_path)
    for read in (later.targets, later.table):
        with pytest.raises(BarnraiseError, match="a target in"):
            read()
    later.close()


def test_event_is_not_lost_while_the_disk_takes_nothing(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {})
    with unwritable(tmp_path):
        assert outbox.save(RUN, record(H0), [notice()])
        assert FILE_NAME in outbox.problem
        assert outbox.watched(RUN) == record(H0)
        assert not outbox.save(RUN, record(H0), [notice()])
        assert [each.notice for each in outbox.waiting()] == [notice()]
    outbox.save_again()
    assert outbox.problem == ""
    later = again(outbox, tmp_path)
    assert [each.notice for each in later.waiting()] == [notice()]
    assert later.watched(RUN) == record(H0)
    later.close()


def test_delivery_is_known_while_the_disk_takes_nothing(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {})
    outbox.save(RUN, None, [notice(key="a"), notice(key="b")])
    first, second = outbox.waiting()
    with unwritable(tmp_path):
        outbox.note_delivered(first, 7.0)
        outbox.note_failed(second, "the server answered 404", 8.0, gives_up=True)
        assert outbox.waiting() == []
    outbox.note_delivered(second, 9.0)  # any later change saves all before it
    assert outbox.problem == ""
    later = again(outbox, tmp_path)
    (row,) = later.table()
    assert (later.waiting(), row.delivered, row.delivered_at) == ([], 2, 9.0)
    later.close()


def test_close_saves_what_the_disk_did_not_take(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {})
    with unwritable(tmp_path):
        outbox.save(RUN, record(H0), [notice()])
    later = again(outbox, tmp_path)
    assert len(later.waiting()) == 1
    later.close()


def test_target_that_the_disk_does_not_take_is_refused(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add(HOOK, EVENTS, {})
    with unwritable(tmp_path):
        with pytest.raises(AgentError, match=FILE_NAME):
            outbox.add(DesktopTarget(), EVENTS, {})
        with pytest.raises(AgentError, match=FILE_NAME):
            outbox.remove("webhook")
        assert [row.name for row in outbox.table()] == ["webhook"]
    assert outbox.add(DesktopTarget(), EVENTS, {}) == "desktop"
    later = again(outbox, tmp_path)
    assert [row.name for row in later.table()] == ["desktop", "webhook"]
    later.close()


def _content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob(f"{FILE_NAME}*"))
