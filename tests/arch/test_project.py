"""What pyproject.toml promises agrees with the code and the documents."""

from __future__ import annotations

import tomllib
from typing import Any

from backyard import __version__
from backyard.core import torch_range
from tests.arch.source_tree import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_torch_is_an_extra_in_the_tested_range_only() -> None:
    project = PROJECT["project"]
    assert not [need for need in project["dependencies"] if need.startswith("torch")]
    assert project["optional-dependencies"]["torch"] == [f"torch{torch_range.TESTED_RANGE}"]
    first = ".".join(map(str, torch_range.TESTED_FIRST))
    below = ".".join(map(str, torch_range.TESTED_BELOW))
    assert f">={first},<{below}" == torch_range.TESTED_RANGE


def test_the_checks_pin_a_torch_in_that_range() -> None:
    lines = (ROOT / ".ci" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = [line for line in lines if line.startswith("torch==")]
    assert torch_range.is_tested(pin.removeprefix("torch=="))


def test_every_requirement_of_the_checks_is_exact() -> None:
    lines = (ROOT / ".ci" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    needs = [line for line in lines if line and not line.startswith("#")]
    assert [need for need in needs if need.count("==") != 1] == []


def test_entry_points() -> None:
    project = PROJECT["project"]
    assert project["scripts"] == {"backyard": "backyard.cli.main:main"}
    assert project["entry-points"]["torch.backends"] == {"backyard": "backyard.collectives.autoload:register"}


def test_the_changelog_knows_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
