"""Checks of real directories, key files and databases: another user must not be able to change them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from barnraise.agent_client.bootstrap import start_agent
from barnraise.core.config import Settings, StateSettings
from barnraise.core.errors import IdentityError, MembershipError
from barnraise.core.ownership.check import check_directory
from barnraise.identity.keys import NodeKey
from barnraise.identity.private_file import create_private, private_directory, read_private
from barnraise.membership.storage import FILE_NAME, MembershipStorage
from barnraise.transport.listener.listener import Listener

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes of Unix")
_OTHER = 4_000_001
_as_root = pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() != 0, reason="only root can give a file to another user"
)


def test_directory_that_all_may_write_to_is_rejected(tmp_path: Path) -> None:
    """Tries a state directory with mode 0777, in which any user could replace cluster.db."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(IdentityError, match="other users may write") as caught:
        private_directory(state)
    assert f"chmod go-w {state}" in caught.value.hint


def test_directory_below_one_that_all_may_write_to_is_rejected(tmp_path: Path) -> None:
    """Tries a private directory whose parent lets any user rename it and put another there."""
    (tmp_path / "open" / "state").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(IdentityError, match="other users may write"):
        private_directory(tmp_path / "open" / "state")
    (tmp_path / "open").chmod(0o1777)  # sticky: our own entries are safe there
    private_directory(tmp_path / "open" / "state")


def test_parents_of_the_home_directory_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "homes" / "anna"
    home.mkdir(parents=True)
    (tmp_path / "homes").chmod(0o777)
    monkeypatch.setenv("HOME", str(home))
    check_directory(private_directory(home / "state"))
    with pytest.raises(IdentityError):
        private_directory(tmp_path / "homes" / "state")


@_as_root
def test_directory_of_another_user_is_rejected(tmp_path: Path) -> None:
    """Tries a state directory that another user made first, before the agent ever starts."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, _OTHER, _OTHER)
    settings = Settings(state=StateSettings(directory=str(state)))
    for use in (
        lambda: private_directory(state),
        lambda: NodeKey.load_or_create(state / "node.key"),
        lambda: MembershipStorage(state),
        lambda: Listener(settings),
        lambda: start_agent(settings),
    ):
        with pytest.raises(IdentityError, match="belongs to another user"):
            use()
    assert list(state.iterdir()) == []


@_as_root
def test_link_of_another_user_to_our_directory_is_rejected(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(state)
    private_directory(link)
    os.chown(link, _OTHER, _OTHER, follow_symlinks=False)
    with pytest.raises(IdentityError, match="belongs to another user"):
        private_directory(link)


@_as_root
def test_key_file_of_another_user_is_rejected(tmp_path: Path) -> None:
    """Tries a node key that another user made and can sign with."""
    NodeKey.load_or_create(tmp_path / "node.key")
    os.chown(tmp_path / "node.key", _OTHER, _OTHER)
    with pytest.raises(IdentityError, match="belongs to another user"):
        NodeKey.load_or_create(tmp_path / "node.key")


@_as_root
def test_database_of_another_user_is_rejected(tmp_path: Path) -> None:
    """Tries a cluster.db of another user, with a trust log in which that user is an owner."""
    MembershipStorage(tmp_path).close()
    os.chown(tmp_path / FILE_NAME, _OTHER, _OTHER)
    with pytest.raises(IdentityError, match="belongs to another user"):
        MembershipStorage(tmp_path)


def test_database_that_others_may_write_is_rejected(tmp_path: Path) -> None:
    MembershipStorage(tmp_path).close()
    (tmp_path / FILE_NAME).chmod(0o666)
    with pytest.raises(IdentityError, match="others may read or change it"):
        MembershipStorage(tmp_path)


def test_database_that_is_a_link_is_rejected(tmp_path: Path) -> None:
    MembershipStorage(tmp_path / "one").close()
    (tmp_path / "two").mkdir(mode=0o700)
    (tmp_path / "two" / FILE_NAME).symlink_to(tmp_path / "one" / FILE_NAME)
    with pytest.raises((IdentityError, MembershipError), match="is not a file"):
        MembershipStorage(tmp_path / "two")


def test_secret_that_a_person_writes_may_lie_in_any_directory(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    assert create_private(shared / "key", b"secret")
    assert read_private(shared / "key") == b"secret"
