"""What `backyard hub` refuses before it makes anything."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest

from backyard.cli.friend import SEAT, _check_free, room
from backyard.cli.hub import Wishes, up
from backyard.cli.hub_mirror import hand_over
from backyard.cli.hub_owner import expel, pardon
from backyard.cli.hub_places import top_folder, write_addresses
from backyard.cli.identity import machine_key
from backyard.cli.later import begun
from backyard.core.config import load_settings
from backyard.core.errors import HubError
from backyard.hub.founding import found_hub, hub_key
from backyard.hub.invites import make_invite
from backyard.hub.log import Log, Member, change
from backyard.hub.messages import Terms
from backyard.hub.seating import Seat, member_key, write_seat
from backyard.identity import NodeKey
from tests.unit.hub.hub_process import HubProcess


def wishes(script: Path, codec: str = "int8", store: str = "", endpoint: str = "") -> Wishes:
    return Wishes(
        name="",
        host="",
        port=52480,
        plain=False,
        address=(),
        uses=1,
        round_time="30s",
        codec=codec,
        train=False,
        parent="",
        seats=100,
        store=store,
        store_endpoint=endpoint,
        folder=script.parent,
        script=str(script),
        arguments=(),
    )


@pytest.fixture
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKYARD_STATE_DIRECTORY", str(tmp_path / "state"))


@pytest.mark.parametrize("codec", ["nonsense", "powersgd"])
def test_a_codec_that_no_hub_can_use(tmp_path: Path, codec: str) -> None:
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
def test_a_store_that_no_hub_can_use(tmp_path: Path, store: str, endpoint: str, why: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(HubError, match=why):
        up(wishes(script, store=store, endpoint=endpoint))
    assert not top_folder(load_settings()).exists()


@pytest.mark.usefixtures("_own_state")
def test_only_the_owners_machine_hands_a_hub_over(capsys: pytest.CaptureFixture[str]) -> None:
    """A machine that took over keeps the run for its owner; its own word would count nowhere."""
    settings = load_settings()
    for name in ("own", "others"):
        directory = top_folder(settings) / name
        mine = member_key(machine_key(settings), hub_key(directory).id)
        found_hub(directory, name, mine.id if name == "own" else NodeKey.generate().id, Terms())
    successor = str(NodeKey.generate().id)
    assert hand_over(node=successor, name="own") == 0
    assert capsys.readouterr().out.startswith("backyard-succession:")
    with pytest.raises(HubError, match="not the owner"):
        hand_over(node=successor, name="others")
    assert not capsys.readouterr().out


@pytest.mark.usefixtures("_own_state")
def test_a_quarantine_ends_and_begins_by_the_owners_word(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_settings()
    directory = top_folder(settings) / "fireside"
    mine = member_key(machine_key(settings), hub_key(directory).id)
    found_hub(directory, "fireside", mine.id, Terms())
    ann, bob = (
        Member(node=str(NodeKey.generate().id), name=name, role="friend", since=0.0, quarantine="too large")
        for name in ("ann", "bob")
    )
    log = Log(directory)
    log.transact([change(Log.put_member, ann), change(Log.put_member, bob)])
    hub = HubProcess(directory, None)
    write_addresses(directory, [hub.address])
    hub.start()
    try:
        assert pardon(member="ann", name="") == 0
        assert "ann may take part again" in capsys.readouterr().err
        with pytest.raises(HubError, match="nobody of fireside"):
            pardon(member="carol", name="")
        found = log.read().members
        assert (found[ann.node].quarantine, found[bob.node].quarantine) == ("", "too large")
        assert expel(member=ann.node[:9], name="") == 0
        assert "sent this machine away" in log.read().members[ann.node].quarantine
        with pytest.raises(HubError, match="cannot be sent away"):
            expel(member="owner", name="")
    finally:
        hub.kill()
        log.close()


@pytest.mark.usefixtures("_own_state")
def test_a_taken_port_ends_the_command_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not when whoever waits for the hub's answer gives up."""
    ends = threading.Event()
    monkeypatch.setattr("backyard.cli.hub._begin_own", lambda *_: ends.wait(120))
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


def test_work_that_nobody_wants_any_more_keeps_no_command() -> None:
    ends = threading.Event()

    async def given_up() -> None:
        work = begun(lambda: ends.wait(120))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.05)

    async def both() -> tuple[int, BaseException | int]:
        found = await asyncio.gather(begun(lambda: 1), begun(lambda: 1 // 0), return_exceptions=True)
        assert isinstance(found[0], int)
        return found[0], found[1]

    began = time.monotonic()
    asyncio.run(given_up())
    assert time.monotonic() - began < 60
    ends.set()
    one, error = asyncio.run(both())
    assert one == 1
    assert isinstance(error, ZeroDivisionError)


def test_a_machine_trains_once_in_a_run() -> None:
    settings, key = load_settings(), NodeKey.generate()
    invite, _ = make_invite(("http://127.0.0.1:1",), key.id, "fireside", role="friend", uses=1, expires=9)
    other, _ = make_invite(
        ("http://127.0.0.1:2",), NodeKey.generate().id, "fireside", role="friend", uses=1, expires=9
    )
    with room(settings, "fireside") as place:
        _check_free(settings, invite)
        seat = Seat(addresses=invite.addresses, hub=invite.hub, key=bytes(32), run="fireside")
        write_seat(seat, place / SEAT)
        with pytest.raises(HubError, match="trains in fireside already") as found:
            _check_free(settings, invite)
        assert "--no-train" in found.value.hint
        _check_free(settings, other)
    _check_free(settings, invite)
