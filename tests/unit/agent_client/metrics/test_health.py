"""``barnraise.health`` on a machine without an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

import barnraise


def test_machine_without_agent_is_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    health = barnraise.health(timeout=1.0)
    assert health.state == "failing"
    assert "barnraise up --detach" in health.problems[0]
