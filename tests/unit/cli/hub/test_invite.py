"""`barnraise invite`: invites are listed, and can be withdrawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from barnraise.cli.hub.directories import is_pinned, top_folder, write_proxied
from barnraise.cli.hub.invite import InviteOptions, run
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError
from barnraise.hub.protocol.invites import Invite, read_invite
from barnraise.hub.protocol.messages import RoundConfig
from barnraise.hub.storage.addresses import write_addresses
from barnraise.hub.storage.create import create_hub, known_invites
from barnraise.hub.storage.log import HubLog, MemberRecord, change
from barnraise.identity import NodeKey

OPTIONS = InviteOptions("", 1, "168h", False, False, False, (), False, "")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path / "state"))
    path = top_folder(load_settings()) / "fireside"
    create_hub(path, "fireside", NodeKey.generate().id, RoundConfig())
    write_addresses(path, ["https://hub.test"])
    return path


def _made(capsys: pytest.CaptureFixture[str], **options: object) -> Invite:
    assert run(OPTIONS._replace(**options)) == 0
    return read_invite(capsys.readouterr().out)


def test_invite_is_listed_with_the_machines_that_came_with_it(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _made(capsys, uses=3), _made(capsys, stranger=True)
    key = str(first.signer.id)
    members = [
        MemberRecord(node=name, name=name, role="friend", since=0.0, invite=key, quarantine=quarantine)
        for name, quarantine in (("ann", ""), ("ben", "expelled"))
    ]
    log = HubLog(directory)
    log.transact([change(HubLog.put_member, member) for member in members])
    log.close()
    assert run(OPTIONS._replace(listed=True)) == 0
    rows = {row[0]: row for row in map(str.split, capsys.readouterr().out.splitlines())}
    assert rows[first.signer.id.short][1:3] == ["friend", "3"]
    assert rows[first.signer.id.short][-3:] == ["ann,", "ben", "(excluded)"]
    assert rows[second.signer.id.short][1:3] == ["stranger", "1"]


def test_withdrawn_invite_is_not_listed_as_usable(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite = _made(capsys)
    short = invite.signer.id.short
    assert run(OPTIONS._replace(revoke=short.lower())) == 0
    assert f"{short} is withdrawn" in capsys.readouterr().err
    (grant,) = known_invites(directory)[0]
    assert grant.withdrawn
    assert run(OPTIONS._replace(listed=True)) == 0
    assert short not in capsys.readouterr().out, "no machine came with it"
    with pytest.raises(HubError, match="no invite of fireside"):
        run(OPTIONS._replace(revoke="ZZZZ-ZZZZ"))


def test_invite_says_whether_a_proxy_ends_tls(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_pinned(directory)
    assert _made(capsys).pinned
    write_proxied(directory, proxied=True)
    assert not _made(capsys).pinned


def test_invite_names_the_command_for_its_role(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for role, command in (("mirror", "hub follow -"), ("region", "--parent -"), ("stranger", "--invite -")):
        assert run(OPTIONS._replace(**{role: True})) == 0
        output = capsys.readouterr()
        assert command in output.err
        assert re.search(r"invite [0-9A-Z]{4}-[0-9A-Z]{4} for 1 machine", output.err)
        assert read_invite(output.out).role == role
    with pytest.raises(HubError, match="a mirror or for a region"):
        run(OPTIONS._replace(mirror=True, region=True))
