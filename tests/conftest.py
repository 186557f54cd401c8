"""For every test: a state directory and a settings file of its own, and no lab where there can be none."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.withheld import Pauses, Undecided

# For the checks: the same examples every time, however slow the machine. Without it each run tries others.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Undecided(Pauses()))


@pytest.fixture(autouse=True, scope="session")
def _own_house() -> Iterator[None]:
    """Nothing reads or writes the settings and keys of the person who runs the tests.

    The directory's name is short, because the path of a Unix socket may have about a hundred characters only.
    """
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("BARNRAISE_")}
    house = Path(tempfile.mkdtemp(prefix="by-"))
    (house / "config.toml").touch()
    os.environ["BARNRAISE_CONFIG"] = str(house / "config.toml")
    os.environ["BARNRAISE_STATE_DIRECTORY"] = str(house / "state")
    yield
    for name in ("BARNRAISE_CONFIG", "BARNRAISE_STATE_DIRECTORY"):
        os.environ.pop(name, None)
    os.environ.update(before)
    shutil.rmtree(house, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_lab()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("lab") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_lab() -> str | None:
    if sys.platform != "linux":
        return "the lab needs Linux network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root"
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    return f"the lab needs {', '.join(missing)}" if missing else None
