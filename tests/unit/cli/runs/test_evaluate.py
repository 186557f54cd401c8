"""Options of ``barnraise eval``, as they reach the run."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from barnraise.cli.main import app
from barnraise.cli.runs import run


def test_machines_are_named_as_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(*given: Any) -> int:
        started.append(given)
        return 0

    monkeypatch.setattr(run, "run", start)
    words = ["eval", "--model", "./model", "--tasks", "mine", "--on", "mac,pc", "--on", "nas"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    ((script, arguments, _, options),) = started
    assert (script, arguments) == ("-m", ["barnraise.integrations.lm_eval", "--tasks", "mine"])
    assert options.on == ("mac", "pc", "nas")
    assert options.models == ("model=./model",)
