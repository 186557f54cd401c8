"""Fixtures of the transport tests: unknown peers may be as slow as this machine is now."""

from __future__ import annotations

import pytest

from barnraise.transport.listener import acceptor


@pytest.fixture(autouse=True)
def _patient_doorkeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the time for a preface, so that a slow test is not rejected."""
    monkeypatch.setattr(acceptor, "PREFACE_DEADLINE_S", 60.0)
