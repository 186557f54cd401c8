"""The owner's own file tries each update before it counts; whatever it does, the hub goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backyard.core.errors import HubError
from backyard.hub import held_out
from backyard.hub.admission import judge_held_out
from backyard.hub.held_out import Trial
from backyard.hub.messages import Course
from tests.unit.hub.hub_process import LAYOUT, Friend, HubProcess, Refused, plainly

COURSE = Course(samples=1000, batch=10, seed=7)
# How far the model is from 1 everywhere; while there is a file "broken" beside it, it fails.
CHECK = """\
from pathlib import Path

print("the owner's own words")


def loss(parameters):
    if (Path(__file__).parent / "broken").exists():
        raise ValueError("no samples today")
    return sum(float((one - 1).square().sum()) for one in parameters.values()) / 1000
"""


def test_an_update_may_be_a_little_worse_and_no_more() -> None:
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


def test_what_makes_the_model_worse_is_refused_and_a_failing_check_blames_nobody(
    hub: HubProcess, check: Path, tmp_path: Path
) -> None:
    invite = hub.invite(uses=2)
    owner, ann, eve = (Friend(hub.address, invite.hub_id, key) for key in (hub.owner, None, None))
    try:
        ann.join(invite, "ann")
        eve.join(invite, "eve")
        owner.push_base(torch.zeros(LAYOUT.numel), COURSE)
        for one in (ann, eve):
            one.pull(tmp_path)
        good = -0.1 * torch.rand(LAYOUT.numel)  # an update is what is subtracted

        lease = eve.lease()
        with pytest.raises(Refused, match="held-out") as refused:
            eve.push(lease, -5 * good)
        assert refused.value.status == 422
        assert "the loss on the hub's own samples is" in refused.value.problem.message

        mine = ann.lease()
        (check.parent / "broken").touch()
        with pytest.raises(Refused, match="untried") as untried:
            ann.push(mine, good)
        assert untried.value.status == 503
        assert "no samples today" in untried.value.problem.message
        assert untried.value.problem.retry_s > 0
        (check.parent / "broken").unlink()
        assert ann.push(mine, good).accepted

        page = plainly(hub.address).text
        assert "held-out" in page
        assert "untried" not in page, "which is nobody's fault"
        assert "the owner's own words" in hub.said(), "and not among the answers"
    finally:
        for one in (owner, ann, eve):
            one.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\n", "has no function loss"),
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
        ("import os\nos._exit(3)\n", "its process ended"),
    ],
)
def test_a_file_that_cannot_try_anything_ends_the_hub_at_once(tmp_path: Path, text: str, why: str) -> None:
    script = tmp_path / "check.py"
    script.write_text(text)
    with pytest.raises(HubError, match=why) as caught:
        Trial(script).start()
    assert "loss(parameters)" in caught.value.hint


def test_a_trial_that_takes_too_long_is_ended_and_the_next_one_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import time\n"
        "def loss(parameters):\n"
        "    if parameters['x'].item() > 1:\n"
        "        time.sleep(600)\n"
        "    return parameters['x'].item()\n"
    )
    trial = Trial(script)
    for name, value in (("slow", 2.0), ("quick", 0.5), ("odd", float("nan"))):
        save_file({"x": torch.tensor(value)}, tmp_path / name)
    try:
        trial.start()
        monkeypatch.setattr(held_out, "_TRIAL_S", 1.0)
        assert "took longer than 1 s" in trial.loss(tmp_path / "slow").failed
        monkeypatch.undo()
        assert trial.loss(tmp_path / "quick").loss == 0.5
        assert trial.loss(tmp_path / "odd").loss is None
        assert "No such file" in trial.loss(tmp_path / "missing").failed
    finally:
        trial.close()
