"""For every test: a state directory and a settings file of its own, and no lab where there can be none."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.tiers import TIERS, tier_of, tier_of_file, waits

# For the gate: the same examples every time, however slow the machine. For the deep tier: others each time.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", _PATIENT, derandomize=True)
settings.register_profile("deep", _PATIENT, print_blob=True)

# A shell starts background jobs with SIGINT ignored, and every process of a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="deep", help="leave out what runs in later tiers only")
    parser.addoption("--seed", type=int, help="replay the simulation of this seed only")
    parser.addoption("--seeds", type=int, help="how many seeds each simulation runs")
    parser.addoption("--one-seed-in", type=int, default=1, help="run this part of the usual seeds")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Callable[[int], Iterable[int]]:
    """Return the seeds that a simulation runs, given their usual number."""
    seed, count = request.config.getoption("--seed"), request.config.getoption("--seeds")
    part = request.config.getoption("--one-seed-in")
    return lambda usual: [seed] if seed is not None else range(count or max(1, usual // part))


@pytest.fixture(autouse=True, scope="session")
def _own_directories() -> Iterator[None]:
    """Keep the tests away from the settings and keys of the user.

    The directory's name is short: the path of a Unix socket may have about a hundred characters only.
    """
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("BARNRAISE_")}
    room = Path(tempfile.mkdtemp(prefix="by-"))
    (room / "config.toml").touch()
    os.environ["BARNRAISE_CONFIG"] = str(room / "config.toml")
    os.environ["BARNRAISE_STATE_DIRECTORY"] = str(room / "state")
    yield
    for name in ("BARNRAISE_CONFIG", "BARNRAISE_STATE_DIRECTORY"):
        os.environ.pop(name, None)
    os.environ.update(before)
    shutil.rmtree(room, ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that belong to later tiers as a whole: to import all of them takes long."""
    if collection_path.suffix != ".py":
        return None
    return TIERS.index(tier_of_file(collection_path)) > TIERS.index(config.getoption("--tier")) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = _why_no_lab()
    wanted = TIERS.index(config.getoption("--tier"))
    left, out = [], []
    for item in items:
        if reason is not None and item.get_closest_marker("lab") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        if waits(item):
            item.add_marker(pytest.mark.clocks)
        tier = tier_of(item)
        if tier == "deep":
            item.add_marker(pytest.mark.deep)
        (left if TIERS.index(tier) <= wanted else out).append(item)
    if out:
        config.hook.pytest_deselected(items=out)
    items[:] = _slow_files_first(left)


def _slow_files_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests, files with slow ones first: then both processes have work until the end."""
    slow = {item.path for item in items if tier_of(item) != "fast"}
    return sorted(items, key=lambda item: item.path not in slow)


def _why_no_lab() -> str | None:
    if sys.platform != "linux":
        return "the lab needs Linux network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root"
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    return f"the lab needs {', '.join(missing)}" if missing else None
