"""The fake container engine as a fixture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.agent.containers.fake_engine import FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="by-e-") as room:
        fake = FakeEngine(Path(room))
        monkeypatch.setenv("PATH", f"{fake.path}{os.pathsep}{os.environ['PATH']}")
        yield fake
        fake.close()
