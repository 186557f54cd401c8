"""``pytest tests/sim --seed N`` replays one run; ``--seeds N`` runs that many per test."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay the simulation of this seed only")
    parser.addoption("--seeds", type=int, default=None, help="how many seeds each simulation runs")
