"""The end of a run says what failed meanwhile, and the exit code tells it to scripts."""

from __future__ import annotations

import pytest

from barnraise.agent_client.run_requests import FailureRow, RunRow
from barnraise.cli.runs import run

CRASH = FailureRow("pc", 1, "ValueError: no such label (train.py:31)", "Traceback ...")
KILLED = FailureRow("nas", 2, "killed by signal 9", "", signal=9)
FOLLOWER = FailureRow("mac", 0, "PeerLost: rank 1 is lost", "", follows=True)


def row(code: int, *failures: FailureRow) -> RunRow:
    return RunRow(
        run="train-abcd", title="", command=("train.py",), by="mac", at=0, phase="ended", generation=1,
        version=1, sentence="the end", machines=("mac",), code=code, failures=failures,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "code", "lines"),
    [
        (row(0), 0, []),
        (row(0, CRASH), run.FORGIVEN, ["pc: ValueError: no such label (train.py:31); restarted"]),
        (row(0, KILLED), 0, ["nas: killed by signal 9; restarted"]),
        (row(1, CRASH, FOLLOWER), 1, []),
        (row(137, KILLED, CRASH), 137, ["nas: killed by signal 9; restarted"]),
        (row(130), 130, []),
    ],
)
def test_end_names_failures_and_sets_the_exit_code(
    ended: RunRow, code: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.say_end(ended) == code
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("barnraise: ")]
    assert [line.removeprefix("barnraise: ") for line in shown[:-1]] == lines
    failed = "barnraise: run train-abcd failed: ValueError: no such label (train.py:31), on pc"
    assert shown[-1] == ("barnraise: run train-abcd: the end" if code in (0, 3, 130) else failed)
