"""The end of a run says what failed meanwhile, and the exit code tells it to scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from barnraise.agent_client.run_requests import FailureRow, ResultsResponse, RunRow
from barnraise.artifacts import ArtifactStore
from barnraise.cli.main import app
from barnraise.cli.runs import run
from barnraise.core.errors import RunError

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
        (row(0, FOLLOWER), 0, []),
        (row(0, KILLED), 0, ["nas: killed by signal 9; restarted"]),
        (row(1, CRASH, FOLLOWER), 1, []),
        (row(137, KILLED, CRASH), 137, ["nas: killed by signal 9; restarted"]),
        (row(130), 130, []),
        (row(3, CRASH), 1, []),  # the script's own code
    ],
)
def test_end_names_failures_and_sets_the_exit_code(
    ended: RunRow, code: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.say_end(ended) == code
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("barnraise: ")]
    assert [line.removeprefix("barnraise: ") for line in shown[:-1]] == lines
    failed = "barnraise: run train-abcd failed: ValueError: no such label (train.py:31), on pc"
    remark = ", although a worker failed (exit code 3)" if code == run.FORGIVEN else ""
    assert shown[-1] == (f"barnraise: run train-abcd: the end{remark}" if code in (0, 3, 130) else failed)


@pytest.mark.parametrize("data", [(), ("pictures={}",), ("pictures=@{}",)])
def test_path_outside_the_folder_gets_a_hint_unless_it_is_sent(
    data: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    pictures, folder = tmp_path / "pictures", tmp_path / "project"
    pictures.mkdir()
    folder.mkdir()
    (pictures / "cat.png").touch()
    script = b"open('~/project')\nopen('~/absent')\nopen('~/pictures/cat.png')\n"
    given = tuple(text.format(pictures) for text in data)
    run._warn_of_local_paths({"train.py": script}, "train.py", folder, given)
    printed = capsys.readouterr().err
    if data:
        assert printed == ""
    else:
        assert f"train.py:3 names {pictures / 'cat.png'}, which the other machines may not have" in printed
        assert f"--data pictures={pictures}, and read it from" in printed


def test_mistyped_script_and_option_get_a_suggestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for words, guess in (
        (("run", "trian.py"), "Did you mean train.py?"),
        (("run", "other/trian.py"), "Give the path of a Python file"),
        (("run", "--modle", "base=x", "train.py"), "Did you mean --model"),
        (("queue", "add", "--metirc", "loss", "train.py"), "Did you mean --metric"),
        (("run", "--xyz", "train.py"), "See the options with --help."),
    ):
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, RunError), result.output
        assert result.exception.hint.startswith(guess)


def test_checkpoints_that_were_left_out_of_the_results_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    response = ResultsResponse(bytes(32), "the results lack out/checkpoint-100")
    monkeypatch.setattr(run, "ask", lambda *_, **__: response)
    monkeypatch.setattr(run, "unpack_into", lambda *_: 2)
    run.bring_results("train-k3f9", ArtifactStore(tmp_path / "store"), tmp_path / "results")
    printed = capsys.readouterr().err
    assert "the results lack out/checkpoint-100" in printed
    assert "the script wrote 2 files" in printed
