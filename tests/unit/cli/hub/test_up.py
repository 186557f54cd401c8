"""Options that `barnraise hub` rejects before it creates anything."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from barnraise.cli.child_process import ChildProcess
from barnraise.cli.hub.directories import top_folder, write_local_address
from barnraise.cli.hub.join import CREDENTIALS_FILE, _check_free, open_workspace
from barnraise.cli.hub.mirror import follow, hand_over, take_over
from barnraise.cli.hub.owner import expel, pardon
from barnraise.cli.hub.status import status
from barnraise.cli.hub.up import HubUpOptions, _new, _save_at_end, up
from barnraise.cli.machine.identity import machine_key
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError
from barnraise.core.flow.background import BackgroundCall, start_in_thread
from barnraise.hub.client.credentials import MemberCredentials, member_key, write_credentials
from barnraise.hub.mirror.handover import read_handover, sign_handover
from barnraise.hub.private_options import PrivateOptions, take_private_options
from barnraise.hub.protocol.invites import HubPlace, invite_text, make_invite
from barnraise.hub.protocol.messages import HubDataOrder, RoundConfig
from barnraise.hub.storage.addresses import write_addresses
from barnraise.hub.storage.create import FOLLOWS, WITHDRAWN, create_hub, hub_key
from barnraise.hub.storage.directory_lock import read_facts
from barnraise.hub.storage.log import HubLog, MemberRecord, change
from barnraise.identity import NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, Refused


def wishes(script: Path, codec: str | None = None, store: str = "", endpoint: str = "") -> HubUpOptions:
    return HubUpOptions(
        name="",
        host="",
        port=52480,
        plain=False,
        proxied=False,
        address=(),
        uses=1,
        round_time=None,
        codec=codec,
        wait_for=None,
        quorum=None,
        max_staleness=None,
        linear_scaling=False,
        rounds=None,
        train=False,
        parent="",
        seats=100,
        held_out=None,
        store=store,
        store_endpoint=endpoint,
        folder=script.parent,
        script=str(script),
        arguments=(),
    )


@pytest.fixture
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state"))


@pytest.mark.parametrize("codec", ["nonsense", "powersgd"])
def test_unusable_codec_is_rejected(tmp_path: Path, codec: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(HubError, match=codec) as caught:
        up(wishes(script, codec))
    assert "int8" in caught.value.hint
    assert not top_folder(load_settings()).exists()


@pytest.mark.parametrize(
    ("store", "endpoint", "why"),
    [
        ("bucket/folder", "", "names no bucket"),
        ("", "https://s3.example.org", "names no bucket"),
        ("s3://our-blobs", "s3.example.org", "no address"),
        ("s3://our-blobs", "http://192.168.1.5:9000", "without TLS"),
    ],
)
@pytest.mark.usefixtures("_own_state")
def test_unusable_store_is_rejected(tmp_path: Path, store: str, endpoint: str, why: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(HubError, match=why):
        up(wishes(script, store=store, endpoint=endpoint))
    assert not top_folder(load_settings()).exists()


@pytest.mark.usefixtures("_own_state")
def test_held_out_options_are_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(HubError, match="tried by the hub above it"):
        up(wishes(script)._replace(parent="an invite", held_out=script))
    with pytest.raises(HubError, match="in the folder that every friend gets"):
        up(wishes(script)._replace(held_out=tmp_path / "check" / "check.py"))
    assert not top_folder(load_settings()).exists()


@pytest.mark.usefixtures("_own_state")
def test_rounds_are_fixed_with_the_hub_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "send" / "train.py"
    script.parent.mkdir()
    script.touch()
    options = wishes(script)._replace(round_time="2min", wait_for=3, quorum=0.8, max_staleness=5)
    options = options._replace(linear_scaling=True, rounds=40)
    _new(options, load_settings())
    capsys.readouterr()
    assert status(name="", as_json=True) == 0
    rounds = {"round_s": 120.0, "codec": "int8", "wait_for": 3, "quorum": 0.8, "max_staleness": 5}
    assert json.loads(capsys.readouterr().out)["rounds"] == rounds | {"linear_scaling": True, "rounds": 40}


@pytest.mark.usefixtures("_own_state")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("round_time", "1min"),
        ("codec", "int4"),
        ("wait_for", 2),
        ("quorum", 1.0),
        ("max_staleness", 0),
        ("linear_scaling", True),
        ("rounds", 3),
    ],
)
@pytest.mark.parametrize("parent", ["", "barnraise-invite:x"])
def test_options_that_a_hub_would_ignore_are_rejected(
    tmp_path: Path, option: str, value: object, parent: str
) -> None:
    given: dict[str, Any] = {option: value}
    options = wishes(tmp_path / "train.py")._replace(script=None, parent=parent, **given)
    with pytest.raises(HubError, match="rounds") as error:
        up(options)
    assert f"--{option.removesuffix('_time').replace('_', '-')}" in error.value.hint


@pytest.mark.usefixtures("_own_state")
def test_hub_saves_the_model_of_its_last_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = top_folder(load_settings()) / "fireside"
    owner = NodeKey.generate()
    create_hub(directory, "fireside", owner.id, msgspec.structs.replace(TERMS, rounds=1))
    hub = HubProcess(directory, None)
    hub.start()
    invite = hub.invite()
    friends = [Friend(hub.address, invite.hub_id, key) for key in (owner, None)]
    try:
        friends[0].push_base(torch.zeros(LAYOUT.numel), HubDataOrder(samples=1000, batch=10))
        saving = BackgroundCall(partial(_save_at_end, invite, directory, tmp_path / "out", load_settings()))
        friends[1].join(invite, "ann")
        friends[1].push(friends[1].lease(), torch.full((LAYOUT.numel,), 0.01))
        saving.wait(60.0)
        assert saving.has_ended
        friends[1].version = 1
        with pytest.raises(Refused, match="finished: all rounds of the run are over"):
            friends[1].lease()
    finally:
        hub.kill()
        for friend in friends:
            friend.close()
    assert "the run is over after 1 round: its model is " in capsys.readouterr().err
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert all(float(tensor.max()) < 0 for tensor in model.values()), "the update of the round is in it"


@pytest.mark.usefixtures("_own_state")
def test_hub_hands_over_and_mirror_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a machine that took over, or that keeps a region: the run's owner is another key there."""
    hub, mirror = top_folder(load_settings()) / "hub", top_folder(load_settings()) / "mirror"
    owner = NodeKey.generate().id
    for directory in (hub, mirror):
        create_hub(directory, directory.name, owner, RoundConfig())
    log = HubLog(mirror)
    log.transact([change(HubLog.set_fact, FOLLOWS, hub_key(hub).id.raw)])
    log.close()
    with pytest.raises(HubError, match="is a mirror"):
        hand_over(node=str(owner), name="mirror")
    assert not capsys.readouterr().out
    assert hand_over(node=str(hub_key(mirror).id), name="hub") == 0
    word = capsys.readouterr().out
    forged = sign_handover(hub_key(mirror), hub_key(hub).id, hub_key(mirror).id, 1, 1 << 40)
    with pytest.raises(HubError, match="neither"):
        take_over(word=forged, name="mirror")
    assert take_over(word=word, name="mirror") == 0
    assert hand_over(node=str(owner), name="mirror") == 0, "it is the hub now"


@pytest.mark.usefixtures("_own_state")
def test_hand_over_can_be_limited_and_withdrawn(capsys: pytest.CaptureFixture[str]) -> None:
    directory = top_folder(load_settings()) / "fireside"
    create_hub(directory, "fireside", NodeKey.generate().id, RoundConfig())
    mirror = NodeKey.generate().id
    assert hand_over(node=str(mirror), name="", lasts="1h") == 0
    handover = read_handover(capsys.readouterr().out, [hub_key(directory).id])
    assert handover.expires - handover.time == 3600
    assert hand_over(node=str(mirror), name="", revoke=True) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert f"{mirror.short} may not take over any more" in output.err
    assert WITHDRAWN in read_facts(directory)


@pytest.mark.parametrize("whose", ["this machine's", "another's", "the hub's"])
@pytest.mark.usefixtures("_own_state")
def test_owner_pardons_and_expels_members(whose: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whosever key the run's owner is: after a take-over it is another machine's, a region's is its own."""
    settings = load_settings()
    directory = top_folder(settings) / "fireside"
    own = hub_key(directory)
    own_key = member_key(machine_key(settings), own.id)
    owners = {"this machine's": own_key, "another's": NodeKey.generate(), "the hub's": own}
    create_hub(directory, "fireside", owners[whose].id, RoundConfig())
    invite = str(NodeKey.generate().id)
    ann, bob, cem = (
        MemberRecord(
            node=str(NodeKey.generate().id),
            name=name,
            role="friend",
            since=0.0,
            quarantine=quarantine,
            invite=invite,
        )
        for name, quarantine in (("ann", "too large"), ("bob", "too large"), ("cem", ""))
    )
    log = HubLog(directory)
    log.transact([change(HubLog.put_member, member) for member in (ann, bob, cem)])
    hub = HubProcess(directory, None)
    write_addresses(directory, ["http://127.0.0.1:9"])  # as friends would reach it, not this machine
    write_local_address(directory, hub.address)
    hub.start()
    try:
        assert pardon(member="ann", name="") == 0
        assert "ann may take part again" in capsys.readouterr().err
        with pytest.raises(HubError, match="no member of fireside"):
            pardon(member="carol", name="")
        members = log.read().members
        assert (members[ann.node].quarantine, members[bob.node].quarantine) == ("", "too large")
        assert expel(member=ann.node[:9], name="") == 0
        assert "still take part: cem" in capsys.readouterr().err
        assert "expelled this machine" in log.read().members[ann.node].quarantine
        with pytest.raises(HubError, match="cannot be expelled"):
            expel(member="owner", name="")
    finally:
        hub.kill()
        log.close()


@pytest.mark.usefixtures("_own_state")
def test_taken_port_fails_the_command_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails at once, before a client of the hub gives up."""
    ends = threading.Event()
    monkeypatch.setattr("barnraise.cli.hub.up._begin_own", lambda *_: ends.wait(120))
    script = tmp_path / "train.py"
    script.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = wishes(script)._replace(host="127.0.0.1", port=taken.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(HubError, match="the hub's process ended"):
            up(given)
    assert time.monotonic() - began < 60
    ends.set()
    assert "cannot listen" in capsys.readouterr().out


def test_abandoned_work_does_not_block_the_command() -> None:
    ends = threading.Event()

    async def given_up() -> None:
        work = start_in_thread(lambda: ends.wait(120))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.05)

    async def both() -> tuple[int, BaseException | int]:
        results = await asyncio.gather(
            start_in_thread(lambda: 1), start_in_thread(lambda: 1 // 0), return_exceptions=True
        )
        assert isinstance(results[0], int)
        return results[0], results[1]

    began = time.monotonic()
    asyncio.run(given_up())
    assert time.monotonic() - began < 60
    ends.set()
    result, error = asyncio.run(both())
    assert result == 1
    assert isinstance(error, ZeroDivisionError)


@pytest.mark.usefixtures("_own_state")
def test_status_names_members_a_round_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    directory = top_folder(load_settings()) / "fireside"
    owner = NodeKey.generate()
    create_hub(directory, "fireside", owner.id, TERMS)
    hub = HubProcess(directory, None)
    write_local_address(directory, hub.address)
    hub.start()
    invite = hub.invite()
    friends = [Friend(hub.address, invite.hub_id, key) for key in (owner, None)]
    try:
        assert status(name="", as_json=False) == 0
        assert "the owner has not pushed the base yet" in capsys.readouterr().out
        friends[0].push_base(torch.zeros(LAYOUT.numel), HubDataOrder(samples=1000, batch=10))
        friends[1].join(invite, "ann")
        friends[1].version = 0
        friends[1].lease()
        assert status(name="", as_json=False) == 0
        assert "waits for ann (training for " in capsys.readouterr().out
    finally:
        hub.kill()
        for friend in friends:
            friend.close()
    assert status(name="", as_json=False) == 0
    assert "barnraise hub up --name fireside" in capsys.readouterr().out


def test_machine_cannot_join_a_run_twice() -> None:
    settings, key = load_settings(), NodeKey.generate()
    invite, other = (
        make_invite(
            HubPlace(("http://127.0.0.1:1",), hub, pinned=True), "fireside", role="friend", uses=1, expires=9
        )[0]
        for hub in (key.id, NodeKey.generate().id)
    )
    with open_workspace(settings, "fireside") as place:
        _check_free(settings, invite)
        credentials = MemberCredentials(
            addresses=invite.addresses, hub=invite.hub, key=bytes(32), run="fireside"
        )
        write_credentials(credentials, place / CREDENTIALS_FILE)
        with pytest.raises(HubError, match="trains in fireside already") as error:
            _check_free(settings, invite)
        assert "--no-train" in error.value.hint
        _check_free(settings, other)
    _check_free(settings, invite)


@pytest.mark.usefixtures("_own_state")
def test_address_without_tls_is_rejected(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(HubError, match="without TLS"):
        up(wishes(script)._replace(address=("http://192.168.1.5:52480",)))
    assert not top_folder(load_settings()).exists()


@pytest.mark.usefixtures("_own_state")
def test_invites_and_secret_addresses_are_no_arguments_of_the_hubs_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of this machine lists the arguments of the processes that a region or a mirror starts."""
    hub = HubPlace(("https://hub.test",), NodeKey.generate().id, pinned=True)
    commands: list[tuple[str, ...]] = []
    started: list[PrivateOptions] = []

    class Started(Exception):
        pass

    async def start(name: str, command: tuple[str, ...], **_: object) -> None:
        commands.append(command)
        started.append(take_private_options(Path(command[command.index("--private-options") + 1])))
        raise Started

    monkeypatch.setattr(ChildProcess, "start", start)
    texts = [
        invite_text(make_invite(hub, "fireside", role=role, uses=1, expires=9)[0])
        for role in ("region", "mirror")
    ]
    secret = "https://region.test/kQ3v9mXwTz7b"
    options = wishes(tmp_path / "train.py")._replace(script=None, folder=None, address=(secret,))
    with pytest.raises(Started):
        up(options._replace(parent=texts[0]))
    with pytest.raises(Started):
        follow(invite=texts[1], name="", host="127.0.0.1", port=1)
    assert [started[0].parent, started[1].follow] == texts
    assert started[0].offer == (secret,)
    for command in commands:
        assert not any(hidden in word for word in command for hidden in (*texts, secret))
