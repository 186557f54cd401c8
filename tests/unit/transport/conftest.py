"""For the tests of transport: strangers may be as slow as this machine is at the moment."""

from __future__ import annotations

import pytest

from barnraise.transport.listener import acceptor


@pytest.fixture(autouse=True)
def _patient_doorkeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a test that stands still between dialling and its preface is turned away, and rightly so."""
    monkeypatch.setattr(acceptor, "PREFACE_DEADLINE_S", 60.0)
