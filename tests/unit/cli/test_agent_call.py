"""Warnings before an agent starts."""

from __future__ import annotations

import os
import sys

import pytest

from barnraise.cli.agent_call import root_warning, warn_of_root


def test_agent_of_root_is_announced_in_one_line() -> None:
    """Tries `barnraise up` as root: the person must learn that every owner is root here."""
    assert "every owner" in root_warning(0)
    assert "root" in root_warning(0)
    assert "\n" not in root_warning(0)
    assert root_warning(1000) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no root")
def test_warning_of_root_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    warn_of_root()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    warn_of_root()
    assert capsys.readouterr() == ("", f"{root_warning(0)}\n")
