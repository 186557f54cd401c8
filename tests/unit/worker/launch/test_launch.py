"""Functions launched on a real agent, as a script or a notebook does it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import barnraise
from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import decode_response, encode
from barnraise.agent_client.run_requests import RunRow, RunsRequest, RunsResponse
from barnraise.core.errors import AgentError, RunError
from tests.unit.lone_agent import lone_agent

SCALE = 10.0


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with lone_agent() as state:
        yield state


@pytest.fixture
def agent(state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(state))
    monkeypatch.chdir(tmp_path)
    return state


def _runs(state: Path) -> tuple[RunRow, ...]:
    with ListenerClient.connect(state, timeout=60) as client:
        response = decode_response(client.ask(encode(RunsRequest()), 60))
    assert isinstance(response, RunsResponse)
    return response.runs


def summed(tensor: torch.Tensor, *, plus: float) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = tensor * SCALE + dist.get_rank() + plus
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} has {total.tolist()}")
    result = {"sum": total.to(torch.bfloat16), "ranks": dist.get_world_size(), "none": None}
    dist.destroy_process_group()
    return result


def test_ranks_share_tensors_and_rank_0_answers(agent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = barnraise.launch(summed, torch.tensor([1.0, 2.0]), plus=0.5, per_node=2, timeout="100s")
    assert torch.equal(result["sum"], torch.tensor([22.0, 42.0], dtype=torch.bfloat16))
    assert (result["ranks"], result["none"]) == (2, None)
    output = capsys.readouterr()
    assert "rank 0 has [22.0, 42.0]" in output.out
    assert "rank 1 has" not in output.out
    assert "barnraise: run summed-" in output.err


def fails_on(rank: int) -> None:
    import os

    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"rank {rank} does not like it")


def test_failed_function_shows_its_traceback(agent: Path) -> None:
    with pytest.raises(RunError) as caught:
        barnraise.launch(fails_on, 1, per_node=2, show=False, timeout=100)
    assert "rank 1 on " in caught.value.message
    assert "ValueError: rank 1 does not like it" in caught.value.message
    assert "in fails_on" in caught.value.message
    assert "barnraise logs" in caught.value.hint


def returns_file() -> object:
    return {"log": [open(__file__)]}


def test_result_that_cannot_be_sent_is_named(agent: Path) -> None:
    with pytest.raises(RunError) as caught:
        barnraise.launch(returns_file, show=False, timeout=100)
    assert "the result['log'][0] is a TextIOWrapper" in caught.value.message


def writes_files(size: int) -> bytes:
    from pathlib import Path

    from own_data import WORD  # type: ignore[import-not-found]

    Path("kept").mkdir()
    Path("kept/model.txt").write_text(WORD)
    return WORD.encode() * size


def test_folder_is_sent_and_files_are_returned(agent: Path, tmp_path: Path) -> None:
    home = tmp_path / "project"
    home.mkdir()
    (home / "own_data.py").write_text("WORD = 'word'\n")
    content = barnraise.launch(writes_files, 3 << 20, folder=home, name="Files!", show=False, timeout=100)
    assert content == b"word" * (3 << 20)
    (run,) = (home / "barnraise-runs").iterdir()
    assert run.name.startswith("files-")
    assert [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()] == [
        os.path.join("kept", "model.txt")
    ]
    assert not (home / "barnraise_launch.py").exists()


def sleeps() -> None:
    import time

    time.sleep(600)


def _ended(state: Path, title: str) -> RunRow:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        rows = [row for row in _runs(state) if row.title == title]
        if rows and rows[-1].phase == "ended":
            return rows[-1]
        time.sleep(0.2)
    raise AssertionError(_runs(state))


def test_deadline_stops_the_run(agent: Path) -> None:
    with pytest.raises(RunError, match="did not end in the time it was given"):
        barnraise.launch(sleeps, name="late", show=False, timeout=2)
    assert _ended(agent, "late").code != 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupt_stops_the_run(agent: Path) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not [row for row in _runs(agent) if row.title == "broken" and row.phase == "running"]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            barnraise.launch(sleeps, name="broken", show=False, timeout=100)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert _ended(agent, "broken").code != 0


# refused before anything starts


def takes(rate: float, timeout: float = 1.0) -> float:
    return rate * timeout


@pytest.mark.parametrize(
    ("args", "options", "sentence"),
    [
        ((), {}, "takes cannot be called so: missing a required argument: 'rate'"),
        ((1,), {"speed": 2}, "unexpected keyword argument 'speed'"),
        ((1,), {"timeout": 5}, "launch and takes both have an argument called timeout"),
        ((torch.nn.Linear(1, 1),), {}, "argument 1 is a Linear"),
        ((), {"rate": [object()]}, "argument rate[0] is an object"),
        ((1,), {"engine": "steam"}, "an option of launch has a value that is not possible"),
    ],
)
def test_invalid_call_is_rejected_at_once(
    agent: Path, args: tuple[Any, ...], options: dict[str, Any], sentence: str
) -> None:
    before = len(_runs(agent))
    with pytest.raises(RunError) as caught:
        barnraise.launch(takes, *args, **options)
    assert sentence in caught.value.message
    assert len(_runs(agent)) == before


def test_closure_is_rejected_at_launch(agent: Path) -> None:
    model = torch.nn.Linear(1, 1)

    def train() -> object:
        return model

    with pytest.raises(RunError, match="train is a closure: it uses model"):
        barnraise.launch(train)


def test_without_an_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    with pytest.raises(AgentError, match="no agent runs on this machine"):
        barnraise.launch(takes, 1.0)
