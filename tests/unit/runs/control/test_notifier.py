"""Choice of the machine that sends the notices of an attempt of a job."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from barnraise.runs.control.lifecycle import next_record
from barnraise.runs.control.notifier import choose_notifier
from barnraise.runs.record import sign_spec
from tests.unit.runs.control.test_lifecycle import KEY, NAMES, A, B, C, at_work, facts, order, report, running


@pytest.mark.parametrize(
    ("present", "notifying", "node", "why"),
    [
        ((A, B, C), (A, B, C), b"", "mac, which added the job"),
        ((B, A), (B,), b"", "mac, which added the job"),
        ((C, B), (B, C), C, "box sends its notices while mac is not here"),
        ((B, C), (C,), C, "box sends its notices while mac is not here"),
        ((B, C), (A,), b"", "mac sends its notices after its return"),
        ((), (), b"", "mac sends its notices after its return"),
    ],
)
def test_first_machine_with_a_target_sends_while_the_adder_is_away(
    present: Sequence[bytes], notifying: Sequence[bytes], node: bytes, why: str
) -> None:
    chosen = choose_notifier(A, present, notifying, lambda raw: NAMES[raw])
    assert chosen.node == node
    assert why in chosen.why


def test_end_of_an_attempt_names_the_machine_that_sends_its_notice() -> None:
    record = sign_spec(order(), KEY)
    failed = {A: report(), B: report("failed", words="no torch"), C: report()}
    end = next_record(record, facts(order(), failed)._replace(notifier=C))
    assert end is not None
    assert (end.phase, end.notifier) == ("ended", C)
    assert next_record(end, facts(order(), failed)._replace(notifier=B)) is None, "an end is final"


def test_running_attempt_names_another_machine_at_once_and_others_with_their_next_version() -> None:
    record = running(order())
    reports = {node: at_work(record, node) for node in record.nodes}
    assert next_record(record, facts(order(), reports)) is None
    named = next_record(record, facts(order(), reports)._replace(notifier=B))
    assert named == replace(record, notifier=B, version=record.version + 1)
    assert next_record(named, facts(order(), reports)._replace(notifier=B)) is None
    back = next_record(named, facts(order(), reports))
    assert back is not None
    assert back.notifier == b""
    waiting = sign_spec(order(), KEY)
    assert next_record(waiting, facts(order(), {}, here=())._replace(notifier=B)) is None
