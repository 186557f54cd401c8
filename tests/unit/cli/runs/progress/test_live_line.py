"""Lines that are redrawn in place leave nothing behind between printed lines."""

from __future__ import annotations

import pytest

from barnraise.cli.runs.progress.live_line import LiveLines, cut


def test_live_lines_are_erased_before_others_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveLines()
    live.erase()
    assert capsys.readouterr().err == "", "there is nothing to erase"
    live.draw(["bar", "status"])
    assert capsys.readouterr().err == "bar\nstatus"
    live.draw(["bar", "status"])
    assert capsys.readouterr().err == "", "nothing has changed"
    live.draw(["status"])
    assert capsys.readouterr().err == "\r\x1b[K\x1b[A\x1b[Kstatus"
    live.erase()
    assert capsys.readouterr().err == "\r\x1b[K"
    live.draw([])
    assert capsys.readouterr().err == ""


def test_cut_counts_wide_characters_twice() -> None:
    assert cut("abcdef", 4) == "abcd"
    assert cut("\u6f22\u5b57x", 3) == "\u6f22"
    assert cut("ab", 4) == "ab"
