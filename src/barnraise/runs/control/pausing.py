"""Which machines of a session rest because the others are faster without them. Pure.

The session's first member says so of the group that it trains in. Two machines stay at least, so that what is
committed has another holder. Once anybody of those who stay is gone, all are wanted again.
"""

from __future__ import annotations

from barnraise.runs.control.worker_status import WorkerStatus
from barnraise.runs.record import LeftOutNode, RunRecord

_LEAST = 2  # machines that go on


def nodes_to_pause(record: RunRecord, first: WorkerStatus) -> tuple[LeftOutNode, ...]:
    """Of this group, by the word of its first member."""
    said = first.state
    if said is None or said.rests_in != record.generation or record.finished:
        return ()
    going = tuple(LeftOutNode(node, said.rests_why) for node in record.nodes if node in said.rests)
    return going if len(record.nodes) - len(going) >= _LEAST else ()


def pause_reason(record: RunRecord, node: bytes) -> str:
    """Why it does; empty: it does not."""
    return next((one.why for one in record.resting if one.node == node), "")
