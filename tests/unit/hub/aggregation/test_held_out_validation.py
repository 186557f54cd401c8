"""Held-out validation: the owner's file tries each update, and no failure of the file stops the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from barnraise.core.errors import HubError
from barnraise.hub.aggregation import held_out_validation
from barnraise.hub.aggregation.held_out_validation import HeldOutTrial
from barnraise.hub.aggregation.update_checks import judge_held_out
from barnraise.hub.protocol.messages import HubDataOrder
from tests.unit.hub.hub_process import LAYOUT, Friend, HubProcess, Refused, plainly

COURSE = HubDataOrder(samples=1000, batch=10, seed=7)
# How far the model is from 1 everywhere; while there is a file "broken" beside it, it fails.
CHECK = """\
from pathlib import Path

print("the owner's own words")


def loss(parameters):
    if (Path(__file__).parent / "broken").exists():
        raise ValueError("no samples today")
    return sum(float((one - 1).square().sum()) for one in parameters.values()) / 1000
"""


def test_held_out_check_accepts_slightly_worse_update_only() -> None:
    assert not judge_held_out(2.0, 1.5).kind
    assert not judge_held_out(2.0, 2.19).kind
    verdict = judge_held_out(2.0, 2.21)
    assert (verdict.kind, "2.21 instead of 2" in verdict.reason) == ("held-out", True)
    assert judge_held_out(2.0, None).kind == "held-out"
    assert not judge_held_out(-2.0, -1.9).kind, "a loss may be negative"
    assert judge_held_out(-2.0, -1.7).kind == "held-out"


@pytest.fixture
def check(tmp_path: Path) -> Path:
    folder = tmp_path / "owner"
    folder.mkdir()
    script = folder / "check.py"
    script.write_text(CHECK)
    return script


@pytest.fixture
def hub(tmp_path: Path, check: Path) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path / "hub")
    process.start("--held-out", str(check))
    try:
        yield process
    finally:
        process.kill()


def test_held_out_check_refuses_worse_model_and_failure_is_not_blamed(
    hub: HubProcess, check: Path, tmp_path: Path
) -> None:
    invite = hub.invite(uses=2)
    owner, ann, eve = (Friend(hub.address, invite.hub_id, key) for key in (hub.owner, None, None))
    try:
        ann.join(invite, "ann")
        eve.join(invite, "eve")
        owner.push_base(torch.zeros(LAYOUT.numel), COURSE)
        for friend in (ann, eve):
            friend.pull(tmp_path)
        good = -0.1 * torch.rand(LAYOUT.numel)  # an update is what is subtracted

        lease = eve.lease()
        with pytest.raises(Refused, match="held-out") as refused:
            eve.push(lease, -5 * good)
        assert refused.value.status == 422
        assert "the loss on the hub's own samples is" in refused.value.problem.message

        lease_of_ann = ann.lease()
        (check.parent / "broken").touch()
        with pytest.raises(Refused, match="untried") as untried:
            ann.push(lease_of_ann, good)
        assert untried.value.status == 503
        assert "no samples today" not in untried.value.problem.message, "the owner's words are for the owner"
        assert "no samples today" in hub.output()
        assert untried.value.problem.retry_s > 0
        (check.parent / "broken").unlink()
        assert ann.push(lease_of_ann, good).accepted

        page = plainly(hub.address).text
        assert "held-out" in page
        assert "untried" not in page, "a failed check is not counted against a member"
        assert "the owner's own words" in hub.output(), "and not among the answers"
    finally:
        for friend in (owner, ann, eve):
            friend.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\n", "has no function loss"),
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
        ("import os\nos._exit(3)\n", "its process exited"),
    ],
)
def test_held_out_file_without_loss_stops_hub_at_start(tmp_path: Path, text: str, why: str) -> None:
    script = tmp_path / "check.py"
    script.write_text(text)
    with pytest.raises(HubError, match=why) as caught:
        HeldOutTrial(script, tmp_path / "model").start()
    assert "loss(parameters)" in caught.value.hint


def test_held_out_trial_times_out_and_next_one_restarts_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import os, time\n"
        "def loss(parameters):\n"
        "    if parameters['x'].item() > 1:\n"
        "        os.fork()\n"
        "        time.sleep(600)\n"
        "    return parameters['x'].item()\n"
    )
    model = tmp_path / "Jürgen's model"
    trial = HeldOutTrial(script, model)
    try:
        trial.start()
        save_file({"x": torch.tensor(2.0)}, model)
        monkeypatch.setattr(held_out_validation, "_TRIAL_S", 1.0)
        assert "took longer than 1 s" in trial.loss().failed, "also if what it has started lives on"
        monkeypatch.undo()
        save_file({"x": torch.tensor(0.5)}, model)
        assert trial.loss().loss == 0.5
        save_file({"x": torch.tensor(float("nan"))}, model)
        assert trial.loss().loss is None
        model.unlink()
        assert "No such file" in trial.loss().failed
    finally:
        trial.close()
    with pytest.raises(HubError, match="the hub is stopping"):
        trial.loss()


def test_held_out_process_ends_with_hub(tmp_path: Path) -> None:
    """The hub is killed during a long trial; the process must end with it."""
    script, model = tmp_path / "check.py", tmp_path / "model"
    script.write_text(
        "import time\ndef loss(parameters):\n    print('tries', flush=True)\n    time.sleep(600)\n"
    )
    save_file({"x": torch.tensor(1.0)}, model)
    command = [sys.executable, "-m", "barnraise.hub.aggregation.held_out_process", str(script), str(model)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, **pipes
    ) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        while b"tries" not in child.stderr.readline():
            pass
        child.stdin.close()
        assert child.wait(60) == 0
