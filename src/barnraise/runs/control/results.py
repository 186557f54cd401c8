"""Where the results of a session are: what members leave behind who have ended well. Pure.

`run.save` writes the model on every machine, by its first worker, so that the death of one of them at the
very end costs nothing. What rank 0 wrote is preferred: a script may have written more there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from barnraise.runs.control.worker_status import WorkerStatus
from barnraise.runs.record import RunRecord


def record_successes(record: RunRecord, seen: Sequence[WorkerStatus]) -> RunRecord:
    """What its members' ends add to what is known of the results. They are forgotten with the next group."""
    well = [one for one in seen if one.ended_well]
    main = [one.slot.node for one in well if one.rank == 0]
    first = [one.slot.node for one in well if one.slot.local_rank == 0]
    return replace(
        record,
        finished=record.finished or bool(well),
        results_at=record.results_at or next(iter(main), b""),
        results_also_at=record.results_also_at or next(iter(first), b""),
    )


def has_results(record: RunRecord) -> bool:
    """Else all who would have written them died first, and others merely ended."""
    return bool(record.results_at or record.results_also_at)


def with_reachable_results(record: RunRecord, here: Collection[bytes]) -> RunRecord:
    """At the end: from where they are brought."""
    known = [node for node in (record.results_at, record.results_also_at) if node]
    return replace(record, results_at=next((node for node in known if node in here), known[0]))
