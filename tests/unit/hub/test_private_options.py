"""Options that must not appear in a process list."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from barnraise.core.errors import BarnraiseError, HubError
from barnraise.hub.private_options import PrivateOptions, take_private_options, write_private_options

OPTIONS = PrivateOptions(parent="barnraise-invite:secret", offer=("https://hub.test/secret",), pinned=False)


def test_private_options_are_readable_once_and_by_their_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "options"
    for _ in range(2):  # a command that starts its hub again writes them again
        write_private_options(OPTIONS, path)
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert take_private_options(path) == OPTIONS
    assert not path.exists()
    with pytest.raises(HubError, match="there is no file"):
        take_private_options(path)
    assert "secret" not in repr(OPTIONS)


def test_private_options_of_other_bytes_are_refused_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "options"
    path.write_bytes(b"nonsense")
    path.chmod(0o600)
    with pytest.raises(HubError, match="hub's options"):
        take_private_options(path)
    assert not path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="files have no mode there")
def test_private_options_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "options"
    write_private_options(OPTIONS, path)
    path.chmod(0o644)
    with pytest.raises(BarnraiseError, match="others may read"):
        take_private_options(path)
