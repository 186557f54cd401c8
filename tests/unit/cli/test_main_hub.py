"""The verbs of a hub as they are typed: one host, a friend, and a mirror that takes over for good."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from barnraise.hub.protocol.invites import read_invite
from barnraise.hub.storage.create import hub_key
from benchmarks.hub.process import free_port
from tests.unit.cli.typed import Machine, Typed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Few samples, so that the run ends by itself.
SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import barnraise

torch.manual_seed(0)
x = torch.randn(256, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
run = barnraise.init()
model, optimizer, batches = run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for batch in batches:
        for a, b in batch:
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
with open("notes.txt", "w") as file:
    file.write("written by the script")
"""


class Hosted:
    """A hub that a person keeps, with its host's machine and its address."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.host, self.friend, self.mirror = (Machine(room, name) for name in ("host", "friend", "mirror"))
        project = self.host.room / "project"
        project.mkdir()
        (project / "train.py").write_text(SCRIPT)
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.words = ("hub", "up", "--plain", "--host", "127.0.0.1", "--port", str(self.port))
        self.words += ("--address", self.address, "--round", "1s", "--no-train", "--uses", "3")
        self.words += ("--folder", str(project), str(project / "train.py"))

    def invite(self, *words: str) -> str:
        return self.host.type("invite", *words).splitlines()[0]

    def members(self) -> dict[str, str]:
        """Ask for all members with the reason of their quarantine."""
        status = json.loads(self.host.type("hub", "status", "--json"))
        return {member["name"]: member["quarantine"] for member in status["members"]}


@pytest.fixture(scope="module")
def hosted() -> Iterator[Hosted]:
    """A hub whose run one friend has trained to its end."""
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as name:
        hosted = Hosted(Path(name))
        with hosted.host.typing(*hosted.words) as up:
            first = _invite_of(up)
            with hosted.friend.typing(
                *("join", "--invite", first, "--yes", "--name", "ann", "--keep", "kept")
            ) as joined:
                assert joined.ended() == 0, joined.output
                assert "1 file written by the script: kept" in joined.output
            yield hosted


def _invite_of(up: Typed) -> str:
    up.until(lambda: "--invite barnraise-invite:" in up.output, "the hub")
    invite = re.search(r"barnraise-invite:\S+", up.output)
    assert invite is not None
    return invite[0]


def test_join_with_keep_leaves_the_files_that_the_script_wrote(hosted: Hosted) -> None:
    kept = hosted.friend.room / "kept"
    assert [file.name for file in kept.iterdir()] == ["notes.txt"], "and not the script itself"
    assert (kept / "notes.txt").read_text() == "written by the script"


def test_hub_export_of_a_trained_run_writes_its_newest_model(hosted: Hosted) -> None:
    output = hosted.host.type("hub", "export", "exported")
    version = re.search(r"at version (\d+)", output)
    assert version is not None
    assert int(version[1]) > 0
    weights = load_file(hosted.host.room / "exported" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {"weight": (1, 4), "bias": (1,)}


def test_hub_expel_and_pardon_change_whether_a_member_may_take_part(hosted: Hosted) -> None:
    assert hosted.members()["ann"] == ""
    output = hosted.host.type("hub", "expel", "ann")
    assert "ann is excluded" in output
    assert "is withdrawn" in output
    assert "expelled this machine" in hosted.members()["ann"]
    words = ("join", "--invite", hosted.invite("--uses", "2"), "--yes", "--name", "ann")
    assert "expelled this machine" in hosted.friend.type(*words, code=1)
    assert "ann may take part again" in hosted.host.type("hub", "pardon", "ann")
    assert hosted.members()["ann"] == ""
    assert "no member of train can be meant" in hosted.host.type("hub", "pardon", "carol", code=1)


@pytest.mark.parametrize(("lasts", "seconds"), [("90min", 5400), ("2h", 7200)])
def test_invite_with_for_can_be_used_for_so_long(hosted: Hosted, lasts: str, seconds: float) -> None:
    began = time.time()
    expires = read_invite(hosted.invite("--for", lasts)).expires
    assert began - 1 <= expires - seconds <= time.time() + 1


def test_invite_with_for_that_is_over_is_refused(hosted: Hosted) -> None:
    text = hosted.invite("--for", "1s")
    time.sleep(max(0.0, read_invite(text).expires + 1.1 - time.time()))
    stranger = Machine(hosted.room, "late")
    assert "the invite has expired" in stranger.type("join", "--invite", text, "--yes", code=1)


def test_hub_follow_with_a_friends_invite_is_refused(hosted: Hosted) -> None:
    machine = Machine(hosted.room, "no-mirror")
    words = ("hub", "follow", "--port", str(free_port()), hosted.invite())
    assert "mirror" in machine.type(*words, code=1)


def test_hub_follow_hand_over_and_take_over_replace_a_host_that_is_gone(hosted: Hosted) -> None:
    """The mirror has the model; after the host's word it is the hub, and friends join it by new invites."""
    port = free_port()
    words = ("hub", "follow", "--name", "copy", "--host", "127.0.0.1", "--port", str(port))
    copy = hosted.mirror.state / "hub" / "copy"
    with hosted.mirror.typing(*words, hosted.invite("--mirror")) as following:
        following.until(lambda: "barnraise hub hand-over " in following.output, "its id")
        mirror_id = re.search(r"barnraise hub hand-over (\S+)", following.output)
        assert mirror_id is not None
        word = hosted.host.type("hub", "hand-over", mirror_id[1]).splitlines()[0]
        following.until(lambda: _exports(hosted.mirror), "the copy of the model")
    own, other = (load_file(_exported(machine, "after")) for machine in (hosted.host, hosted.mirror))
    assert {name: tensor.tolist() for name, tensor in own.items()} == {
        name: tensor.tolist() for name, tensor in other.items()
    }
    assert "mirror" in hosted.mirror.type("hub", "hand-over", mirror_id[1], code=1)
    assert "this is the hub now" in hosted.mirror.type("hub", "take-over", word)
    address = f"http://127.0.0.1:{port}"
    again = ("hub", "up", "--plain", "--no-train", "--name", "copy", "--host", "127.0.0.1")
    with hosted.mirror.typing(*again, "--port", str(port), "--address", address) as up:
        invite = read_invite(_invite_of(up))
        assert (invite.addresses, invite.hub_id) == ((address,), hub_key(copy).id)
        friend = Machine(hosted.room, "late-friend")
        with friend.typing("join", "--invite", _invite_of(up), "--yes", "--name", "bob") as joined:
            joined.until(lambda: "this machine is bob" in joined.output, "a friend of the new hub")
            joined.ended()
        status = json.loads(hosted.mirror.type("hub", "status", "--json"))
        assert {"ann", "bob"} <= {member["name"] for member in status["members"]}


def _exports(machine: Machine) -> bool:
    try:
        machine.type("hub", "export", "before")
    except AssertionError:  # nothing is there yet
        return False
    return True


def _exported(machine: Machine, folder: str) -> Path:
    machine.type("hub", "export", folder)
    return machine.room / folder / "model.safetensors"
