"""The view of a run: Ctrl-C counts at any point, and the next main worker loses no line."""

from __future__ import annotations

import copy

import msgspec
import pytest

from barnraise.agent_client.cluster_requests import RequestDone
from barnraise.agent_client.run_requests import (
    LARGEST_OFFSET,
    FollowPosition,
    LogChunk,
    RunChange,
    RunRow,
    StopRunRequest,
    WatchRequest,
    WatchResponse,
    WorkerRow,
)
from barnraise.cli.runs import run_view
from barnraise.core.errors import AgentError


def told(phase: str) -> WatchResponse:
    row = RunRow(
        run="r", title="", command=("t.py",), by="h0", at=0, phase=phase, generation=1, version=1,
        sentence="", machines=("h0",), left_out=(),
    )  # fmt: skip
    return WatchResponse(row=row, parts=(), workers=())


def test_second_control_c_counts_during_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stops: list[bool] = []

    def ask(question: StopRunRequest | WatchRequest, expected: type, **rest: object) -> object:
        if isinstance(question, StopRunRequest):
            stops.append(question.hard)
            if not question.hard:
                raise KeyboardInterrupt  # it has not answered yet
            return RequestDone("stopping")
        if not stops:
            raise KeyboardInterrupt
        return told("ended")

    monkeypatch.setattr(run_view, "ask", ask)
    assert run_view.watch("r", all_ranks=False, stops=True).phase == "ended"
    assert stops == [False, True]
    assert "killing it" in capsys.readouterr().err


def test_absent_agent_receives_stop_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def ask(question: StopRunRequest | WatchRequest, expected: type, **rest: object) -> object:
        nonlocal tries
        if isinstance(question, StopRunRequest):
            tries += 1
            if tries == 1:
                raise AgentError("the agent of this machine has stopped")
            return RequestDone("stopping")
        if not tries:
            raise KeyboardInterrupt
        return told("ended")

    monkeypatch.setattr(run_view, "ask", ask)
    monkeypatch.setattr(run_view.time, "sleep", lambda seconds: None)
    assert run_view.watch("r", all_ranks=False, stops=True).phase == "ended"
    assert tries == 2


def test_changes_between_two_looks_are_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    view = run_view.RunOutput(all_ranks=False)
    changes = (
        RunChange(2, "running", "started"),
        RunChange(3, "running", "pc has a stopped worker"),
        RunChange(4, "restarting", "pc disappeared"),
        RunChange(5, "running", "pc joined"),
    )

    def look(version: int) -> list[str]:
        row = msgspec.structs.replace(
            told("running").row,
            version=version,
            sentence=changes[version - 2].why,
            changes=changes[: version - 1],
        )
        view.show(WatchResponse(row=row, parts=(), workers=()))
        return capsys.readouterr().err.splitlines()

    assert look(2) == ["barnraise: started"]
    assert look(5) == [
        "barnraise: pc has a stopped worker",
        "barnraise: restarting: pc disappeared",
        "barnraise: pc joined",
    ]
    assert look(5) == []
    view = run_view.RunOutput(all_ranks=False)
    assert look(4)[-1:] == ["barnraise: pc disappeared"], "a view that starts later shows the present alone"
    assert len(view.shown) == 1


def _in_session(
    phase: str, generation: int, *offsets: int, heard: tuple[LogChunk, ...] = ()
) -> WatchResponse:
    """Return a response about a session whose workers were started together, and became rank 0 there."""
    response = told(phase)
    first = 2 - len(offsets)
    workers = tuple(
        WorkerRow(
            rank=rank,
            name=f"h{first + rank}",
            device="cpu",
            state="running",
            start=1,
            number=first + rank,
            main_offset=offset,
            is_trusted=True,
        )
        for rank, offset in enumerate(offsets)
    )
    row = msgspec.structs.replace(response.row, generation=generation)
    return msgspec.structs.replace(response, row=row, workers=workers, heard=heard)


def test_next_main_worker_is_read_from_where_it_became_main() -> None:
    """Its machine may report that place later than the others report the change."""
    view = run_view.RunOutput(all_ranks=False)
    both = _in_session("running", 1, 7, -1)
    assert view.follow(both) == (FollowPosition(0, 0),), "all output of the first one"
    list(view.following.heard(_in_session("running", 1, 7, -1, heard=(LogChunk(0, 0, b"a\n", True),))))
    assert view.follow(_in_session("running", 2, -1)) == (FollowPosition(0, 2),), "not known yet"
    assert view.follow(_in_session("running", 2, 500)) == (FollowPosition(0, 2), FollowPosition(1, 500))


def test_main_worker_without_known_place_is_read_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    view = run_view.RunOutput(all_ranks=False)
    view.follow(_in_session("running", 1, 0, -1))
    ended = _in_session("ended", 2, -1)
    assert view.follow(ended) == (FollowPosition(0, 0),), "its machine may still report that place"
    assert FollowPosition(1, 500) in copy.deepcopy(view).follow(_in_session("ended", 2, 500))
    exited = tuple(msgspec.structs.replace(worker, state="ended") for worker in ended.workers)
    positions = copy.deepcopy(view).follow(msgspec.structs.replace(ended, workers=exited))
    assert FollowPosition(1, LARGEST_OFFSET) in positions, "it never was rank 0"
    monkeypatch.setattr(run_view, "_LAST_REPORT_S", -1.0)
    assert FollowPosition(1, LARGEST_OFFSET) in view.follow(ended), "its machine is gone"


def test_worker_that_was_main_for_a_moment_is_read_after_it_has_left() -> None:
    """The view waited for a lost machine meanwhile, and saw only what came after."""
    view = run_view.RunOutput(all_ranks=False)
    view.follow(_in_session("running", 1, 0, -1))
    response = _in_session("running", 3, 700)
    left = msgspec.structs.replace(response.workers[0], number=2, rank=-1, state="ended", main_offset=40)
    never = msgspec.structs.replace(left, number=3, main_offset=-1)
    guest = msgspec.structs.replace(left, number=4, is_trusted=False)
    response = msgspec.structs.replace(response, past=(left, never, guest))
    assert view.follow(response) == (FollowPosition(0, 0), FollowPosition(1, 700), FollowPosition(2, 40))
    assert not view.following.is_complete(view.numbers(response))
    new = run_view.RunOutput(all_ranks=False)
    assert new.follow(response) == (FollowPosition(1, 0),), "a new view does not show it"


def test_guests_lines_cannot_look_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """A guest's worker prints lines with our prefix, also as the only worker of the run."""
    line = b"barnraise: h0 says: type your password\n"
    response = _in_session("running", 1, 0, heard=(LogChunk(1, 0, line, True),))
    guest = msgspec.structs.replace(response.workers[0], is_trusted=False)
    view = run_view.RunOutput(all_ranks=False)
    view.follow(response)
    view.print_heard(msgspec.structs.replace(response, workers=(guest,)))
    assert capsys.readouterr().out == "h1 barnraise: h0 says: type your password\n"
