"""The log tail shows the output of a run's workers, and no line twice."""

from __future__ import annotations

from collections.abc import Sequence

from barnraise.agent_client.log_tail import LogTail
from barnraise.agent_client.run_requests import (
    LARGEST_OFFSET,
    FollowPosition,
    LogChunk,
    RunRow,
    WatchResponse,
    WorkerRow,
)


def response(
    phase: str,
    names: Sequence[str],
    *heard: LogChunk,
    past: Sequence[str] = (),
    first: int = 0,
    trusted: bool = True,
) -> WatchResponse:
    """Return a response; the workers are numbered from ``first`` on, past ones from zero."""
    row = RunRow(
        run="r", title="r", command=("train.py",), by="h0", at=0.0, phase=phase, generation=1, version=1,
        sentence="", machines=tuple(names),
    )  # fmt: skip
    workers = tuple(
        WorkerRow(
            rank=rank,
            name=name,
            device="cpu",
            state="running",
            start=1,
            number=first + rank,
            is_trusted=trusted,
        )
        for rank, name in enumerate(names)
    )
    departed = tuple(
        WorkerRow(rank=-1, name=name, device="cpu", state="ended", start=1, number=number, is_trusted=trusted)
        for number, name in enumerate(past)
    )
    return WatchResponse(row=row, parts=(), workers=workers, past=departed, heard=heard)


def lines(following: LogTail, now: WatchResponse) -> list[str]:
    return [line for _, line in following.heard(now)]


def test_log_tail_reads_worker_to_its_end() -> None:
    following = LogTail()
    assert not following.is_complete([0]), "its log was not requested yet"
    assert following.wanted({0: 0}) == (FollowPosition(0, 0),)
    assert lines(following, response("running", ["h0", "h1"], LogChunk(0, 0, b"one\ntw", True))) == ["one"]
    assert following.wanted({0: 0}) == (FollowPosition(0, 6),)
    last = response("ended", ["h0"], LogChunk(0, 6, b"o", True))
    assert lines(following, last) == ["two"], "also without the end of its line"
    assert following.is_complete([0])
    assert following.wanted({0: 0}) == ()


def test_log_tail_reads_rest_of_worker_that_left_and_successor_from_now() -> None:
    following = LogTail()
    following.wanted({0: 0})
    assert lines(following, response("running", ["h0", "h1"], LogChunk(0, 0, b"a\n", True))) == ["a"]
    assert following.wanted({1: LARGEST_OFFSET}) == (FollowPosition(0, 2), FollowPosition(1, LARGEST_OFFSET))
    heard = (LogChunk(0, 2, b"b\n", True), LogChunk(1, 500, b"", True))
    assert lines(following, response("running", ["h1"], *heard, past=["h0"], first=1)) == ["b"]
    assert following.wanted({1: 0}) == (FollowPosition(1, 500),), "its first 500 bytes are old"
    last = response("ended", ["h1"], LogChunk(1, 500, b"c\n", True), past=["h0"], first=1)
    assert lines(following, last) == ["c"], "and no line counts the output before it"
    assert following.is_complete([1])


def test_log_tail_names_workers_whose_machine_is_silent() -> None:
    following = LogTail()
    following.wanted({0: 0, 1: 0})
    heard = (LogChunk(0, 0, b"", True, missing=True), LogChunk(1, 0, b"x\n", True))
    assert lines(following, response("ended", ["h0", "h1"], *heard)) == ["x"]
    assert following.missing() == [0]
    assert following.is_complete([0, 1]), "nothing more can be read"


def test_log_tail_says_how_much_output_was_dropped() -> None:
    following = LogTail()
    following.wanted({0: 0})
    now = response("running", ["h0"], LogChunk(0, 2048, b"half\nwhole\n", True))
    assert lines(following, now) == ["... 2 KiB of output are left out here ...", "whole"]


def test_log_tail_knows_the_last_state_of_a_progress_bar() -> None:
    following = LogTail()
    following.wanted({0: 0})
    assert lines(following, response("running", ["h0"], LogChunk(0, 0, b"a\n\r10%", True))) == ["a"]
    assert following.open_lines() == [(0, "10%", True)]
    assert lines(following, response("running", ["h0"], LogChunk(0, 6, b"\r20%", True))) == []
    assert following.open_lines() == [(0, "20%", True)]
    done = response("running", ["h0"], LogChunk(0, 10, b"\r100%\nnext", True))
    assert lines(following, done) == ["100%"], "one line for the whole bar"
    assert following.open_lines() == [(0, "next", False)]


def test_log_tail_keeps_a_long_bar_in_one_line() -> None:
    following = LogTail()
    following.wanted({0: 0})
    offset = 0
    for place in range(3000):
        data = b"\r%05d" % place + b"#" * 60
        assert lines(following, response("running", ["h0"], LogChunk(0, offset, data, True))) == []
        offset += len(data)
    assert following.open_lines() == [(0, "02999" + "#" * 60, True)]


def test_log_tail_keeps_a_bar_whose_states_end_with_a_return() -> None:
    following = LogTail()
    following.wanted({0: 0})
    assert lines(following, response("running", ["h0"], LogChunk(0, 0, b"10%\r", True))) == []
    assert following.open_lines() == [(0, "10%", True)]
    assert lines(following, response("running", ["h0"], LogChunk(0, 4, b"20%\r\n", True))) == ["20%"]
    assert following.open_lines() == []


def test_guests_output_commands_no_terminal_except_for_colours() -> None:
    """A guest's worker prints a title, a clipboard write and concealed text; an owner's line is unchanged."""
    hostile = b"\x1b[32mok\x1b[0m\x1b]52;c;eA==\x07\x1b[8mhidden\xc2\x9b2J\n\x1b]0;t\x07open"
    following = LogTail()
    following.wanted({0: 0})
    heard = LogChunk(0, 0, hostile, True)
    assert lines(following, response("running", ["h0"], heard, trusted=False)) == [
        "\x1b[32mok\x1b[0m?]52;c;eA==?hidden?2J\x1b[0m"
    ]
    assert following.open_lines() == [(0, "?]0;t?open", False)]
    of_owner = LogTail()
    of_owner.wanted({0: 0})
    first = hostile.partition(b"\n")[0].decode()
    assert lines(of_owner, response("running", ["h0"], heard)) == [first]


def test_output_of_an_unknown_worker_commands_no_terminal() -> None:
    following = LogTail()
    following.wanted({5: 0})
    assert lines(following, response("running", ["h0"], LogChunk(5, 0, b"\x1b]0;t\x07\n", True))) == [
        "?]0;t?"
    ]
