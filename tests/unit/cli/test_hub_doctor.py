"""The doctor's look at hubs: real ones on loopback, kept here or joined, right, wrong and silent."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.cli.doctor import hub_checks, network_checks
from barnraise.cli.doctor.facts import HubFacts
from barnraise.cli.hub.directories import top_folder, workspace_root
from barnraise.cli.hub.join import CREDENTIALS_FILE
from barnraise.core.config import load_settings
from barnraise.hub.client.credentials import MemberCredentials, write_credentials
from barnraise.hub.protocol.messages import RoundConfig
from barnraise.hub.storage.addresses import write_addresses
from barnraise.hub.storage.create import hub_key
from barnraise.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import HubProcess


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state"))


@pytest.fixture
def hub(_own_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubProcess]:
    """Kept on this machine, in a process that serves, however slowly."""
    monkeypatch.setattr(hub_checks, "_ANSWER_S", 60.0)
    monkeypatch.setattr(hub_checks, "_ALL_S", 60.0)
    process = HubProcess(top_folder(load_settings()) / "fireside", RoundConfig())
    process.start()
    try:
        yield process
    finally:
        process.kill()


def make_room(name: str, pid: int, has: str) -> Path:
    """Make the folder of a command with this pid."""
    room = workspace_root(load_settings()) / f"{name}-0a1b2c3d-{pid}"
    room.mkdir(parents=True)
    if has:
        (room / has).touch()
    return room


def look() -> list[HubFacts]:
    return hub_checks.hubs(load_settings())


def sit(pid: int, hub: NodeId, *addresses: str) -> None:
    room = make_room("theirs", pid, "")
    credentials = MemberCredentials(
        addresses=addresses, hub=hub.raw, key=bytes(32), run="theirs", folder=str(room)
    )
    write_credentials(credentials, room / CREDENTIALS_FILE)


def test_without_hubs_nothing_is_said() -> None:
    assert look() == []


def test_hosted_hub_is_checked(hub: HubProcess) -> None:
    assert look() == [], "it has no address yet"
    write_addresses(hub.directory, [hub.address])
    (facts,) = look()
    (way,) = facts.ways
    assert (facts.name, facts.kept, facts.up, facts.region) == ("fireside", True, False, False)
    assert (way.answers, way.other, way.words) == (True, False, "")
    assert way.ahead_s is not None
    assert abs(way.ahead_s) < 60
    reached, alone = network_checks.hub(facts, "linux")
    assert (reached.state, alone.state) == ("ok", "warn")
    hub.kill()
    (facts,) = look()
    assert not facts.ways[0].answers
    assert "not running" in network_checks.hub(facts, "linux")[0].sentence
    room = make_room("fireside", os.getpid(), "hub.output")
    (facts,) = look()
    assert facts.up
    assert network_checks.hub(facts, "linux")[0].state == "fail"
    room.rename(room.with_name("fireside-0a1b2c3d-999999999"))
    assert not look()[0].up, "the process that kept it has exited"


def test_joined_hub_is_checked(hub: HubProcess) -> None:
    right, wrong = hub_key(hub.directory).id, NodeKey.generate().id
    sit(os.getpid(), wrong, hub.address)
    (facts,) = look()
    assert (facts.name, facts.kept, facts.ways[0].other) == ("theirs", False, True)
    (row,) = network_checks.hub(facts, "linux")
    assert row.state == "fail"
    assert "not signed with the key of the invite" in row.sentence
    (room,) = workspace_root(load_settings()).iterdir()
    (room / CREDENTIALS_FILE).unlink()
    room.rmdir()
    sit(os.getpid(), right, "https://127.0.0.1:1", hub.address)
    (facts,) = look()
    assert [way.answers for way in facts.ways] == [False, True]
    assert [row.state for row in network_checks.hub(facts, "linux")] == ["ok"]
    write_addresses(hub.directory, [hub.address])
    (facts,) = look()
    assert facts.kept, "the host's own part in it is not another hub"


def test_silent_hub_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        sit(os.getpid(), NodeKey.generate().id, f"http://{address}", f"https://{address}")
        began = time.monotonic()
        (facts,) = look()
        assert time.monotonic() - began < 20.0
    assert [(way.answers, way.other) for way in facts.ways] == [(False, False)] * 2
    assert all("in time" in way.words for way in facts.ways)
    assert network_checks.hub(facts, "linux")[0].state == "warn"
