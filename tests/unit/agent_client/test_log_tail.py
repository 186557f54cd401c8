"""The log tail shows all output of the main worker of a run, and no line twice."""

from __future__ import annotations

from barnraise.agent_client.log_tail import LogTail
from barnraise.agent_client.run_requests import LogChunk, RunRow, WatchResponse, WorkerRow


def told(phase: str, generation: int, names: list[str], *heard: LogChunk) -> WatchResponse:
    row = RunRow(
        run="r",
        title="r",
        command=("train.py",),
        by="h0",
        at=0.0,
        phase=phase,
        generation=generation,
        version=generation,
        sentence="",
        machines=tuple(names),
    )
    workers = tuple(
        WorkerRow(rank=rank, name=name, device="cpu", state="running", start=1)
        for rank, name in enumerate(names)
    )
    return WatchResponse(row=row, parts=(), workers=workers, heard=heard)


def lines(following: LogTail, now: WatchResponse) -> list[str]:
    return [line for _, line in following.heard(now)]


def test_log_tail_follows_worker_through_generations() -> None:
    following = LogTail()
    first = told("running", 1, ["h0", "h1"])
    assert not following.is_complete(first), "its log was not requested yet"
    assert [
        (request.rank, request.generation, request.offset) for request in following.wanted(first, [0])
    ] == [(0, 1, 0)]
    assert lines(following, told("running", 1, ["h0", "h1"], LogChunk(0, 1, 0, b"one\ntw", True))) == ["one"]
    alone = told("running", 2, ["h0"])
    assert [(request.generation, request.offset) for request in following.wanted(alone, [0])] == [(2, 6)]
    last = told("ended", 2, ["h0"], LogChunk(0, 2, 6, b"o", True))
    assert lines(following, last) == ["two"], "also without the end of its line"
    assert following.is_complete(last)


def test_log_tail_reads_successor_of_dead_rank_after_run_stops() -> None:
    """No machine answered for the dead one until the run was over."""
    following = LogTail()
    following.wanted(told("running", 1, ["h0", "h1"]), [0])
    last = told("ended", 2, ["h1"], LogChunk(0, 1, 0, b"", True))
    assert lines(following, last) == []
    assert not following.is_complete(last), "h1 has the rank, and its log was not read yet"
    assert [
        (request.rank, request.generation, request.offset) for request in following.wanted(last, [0])
    ] == [(0, 2, 0)]
    heard = told("ended", 2, ["h1"], LogChunk(0, 2, 0, b"final\n", True))
    assert lines(following, heard) == ["final"]
    assert following.is_complete(heard)
