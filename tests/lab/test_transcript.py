"""The session in the documentation is what the commands really print."""

from __future__ import annotations

import pytest

from benchmarks.transcript import FILE, normal, record


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_session_in_the_docs_is_real() -> None:
    assert normal(record()) == normal(FILE.read_text(encoding="utf-8"))
