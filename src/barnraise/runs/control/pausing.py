"""Pausing of machines that slow a session down. Pure.

Rank 0 asks for it, for the group that it trains in. At least two machines keep training, so that a committed
step has a second holder. When one of these is lost, all paused machines may join again.
"""

from __future__ import annotations

from barnraise.runs.control.worker_status import WorkerStatus
from barnraise.runs.record import LeftOutNode, RunRecord

_MIN_MACHINES = 2  # that keep training


def nodes_to_pause(record: RunRecord, first: WorkerStatus) -> tuple[LeftOutNode, ...]:
    """Return the machines that rank 0 asked to pause in the current generation."""
    state = first.state
    if state is None or state.pauses_in != record.generation or record.finished:
        return ()
    pausing = tuple(LeftOutNode(node, state.pauses_why) for node in record.nodes if node in state.pauses)
    return pausing if len(record.nodes) - len(pausing) >= _MIN_MACHINES else ()


def pause_reason(record: RunRecord, node: bytes) -> str:
    """Return the reason why a machine is paused; an empty text if it is not."""
    return next((machine.why for machine in record.paused if machine.node == node), "")
