"""Directory lock: one process at a time, and one run for good."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from barnraise.cli.hub.directories import top_folder
from barnraise.cli.hub.mirror import follow
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError
from barnraise.hub.__main__ import run
from barnraise.hub.protocol.invites import HubPlace, Invite, invite_text, make_invite
from barnraise.hub.server.server import ListenOptions
from barnraise.hub.storage.create import FOLLOWS, SUCCEEDS, create_hub, hub_blobs
from barnraise.hub.storage.directory_lock import check_mirror, check_region, lock_directory, read_facts
from barnraise.hub.storage.log import HubLog, change
from barnraise.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import TERMS

HERE = ListenOptions("127.0.0.1", 0, plain=True)


def _invite(hub: NodeId) -> Invite:
    place = HubPlace(("http://127.0.0.1:1",), hub, pinned=True)
    return make_invite(place, "fireside", role="mirror", uses=1, expires=9)[0]


def _found(directory: Path, parent: NodeId | None = None) -> None:
    create_hub(directory, "fireside", NodeKey.generate().id, TERMS, parent=parent)


def _note(directory: Path, name: str, value: bytes) -> None:
    log = HubLog(directory)
    log.transact([change(HubLog.set_fact, name, value)])
    log.close()


def test_second_process_changes_nothing(tmp_path: Path) -> None:
    _found(tmp_path)
    about_to_count = hub_blobs(tmp_path).put(b"of the first process")
    with lock_directory(tmp_path):
        for given in (
            {},
            {"follow": _invite(NodeKey.generate().id)},
            {"parent": _invite(NodeKey.generate().id)},
        ):
            with pytest.raises(HubError, match="another process") as caught:
                run(tmp_path, HERE, **given)
            assert "Stop" in caught.value.hint
    assert hub_blobs(tmp_path).has(about_to_count)
    with lock_directory(tmp_path):
        pass  # it was let go


def test_hub_with_taken_port_changes_nothing(tmp_path: Path) -> None:
    _found(tmp_path)
    orphan = hub_blobs(tmp_path).put(b"whatever")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(HubError, match="cannot listen"):
        run(tmp_path, HERE._replace(port=taken.getsockname()[1]))
    assert hub_blobs(tmp_path).has(orphan)


def test_mirror_belongs_to_one_hub(tmp_path: Path) -> None:
    hub, other = NodeKey.generate().id, NodeKey.generate().id
    check_mirror(read_facts(tmp_path), tmp_path, hub)
    _found(tmp_path)
    with pytest.raises(HubError, match="a hub of its own"):
        run(tmp_path, HERE, follow=_invite(hub))
    _note(tmp_path, FOLLOWS, hub.raw)
    check_mirror(read_facts(tmp_path), tmp_path, hub)
    with pytest.raises(HubError, match="a mirror of another hub") as caught:
        run(tmp_path, HERE, follow=_invite(other))
    assert "--name" in caught.value.hint
    _note(tmp_path, SUCCEEDS, b"the owner's word")
    with pytest.raises(HubError, match="has taken over") as caught:
        run(tmp_path, HERE, follow=_invite(hub))
    assert "hub up" in caught.value.hint


def test_region_belongs_to_one_hub(tmp_path: Path) -> None:
    hub, other = NodeKey.generate().id, NodeKey.generate().id
    check_region(read_facts(tmp_path), tmp_path, hub)
    _found(tmp_path, parent=hub)
    check_region(read_facts(tmp_path), tmp_path, hub)
    with pytest.raises(HubError, match="belongs to another hub") as caught:
        run(tmp_path, HERE, parent=_invite(other))
    assert "--name" in caught.value.hint
    with pytest.raises(HubError, match="is a region") as caught:
        run(tmp_path, HERE)
    assert "--parent" in caught.value.hint
    with pytest.raises(HubError, match="a hub of its own"):
        run(tmp_path, HERE, follow=_invite(hub))
    _found(tmp_path / "own")
    with pytest.raises(HubError, match="not a region"):
        run(tmp_path / "own", HERE, parent=_invite(hub))


def test_mirror_directory_of_another_hub_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    _found(top_folder(load_settings()) / "fireside-mirror")
    with pytest.raises(HubError, match="a hub of its own"):
        follow(invite=invite_text(_invite(NodeKey.generate().id)), name="", host="127.0.0.1", port=1)
    assert not capsys.readouterr().out
