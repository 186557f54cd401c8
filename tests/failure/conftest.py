"""One crew for all of these tests; each test takes the workers it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.failure.crew import PATIENT_CLOCKS, Crew, Worker

if sys.platform == "win32":
    collect_ignore_glob = ["test_*.py"]  # fork, SIGSTOP and SIGKILL are not there; nobody has run these on it


@pytest.fixture(scope="package")
def crew() -> Iterator[Crew]:
    # a ring for every size: then most survivors are not the dead rank's neighbours
    made = Crew({**PATIENT_CLOCKS, "BARNRAISE_COLLECTIVES_STRATEGY": "ring"})
    yield made
    made.close()


@pytest.fixture
def take(crew: Crew) -> Iterator[Callable[[int], list[Worker]]]:
    yield crew.take
    crew.give_back()


@pytest.fixture
def four(crew: Crew, take: Callable[[int], list[Worker]]) -> list[Worker]:
    """Four workers in one group."""
    workers = take(4)
    crew.join(workers)
    return workers
