"""Tests that need a lab carry the marker `lab` and are skipped, with the reason, where none can be made."""

from pathlib import Path

import pytest

from lab import why_unavailable

_HERE = Path(__file__).parent
_PURE = "test_lab_parts.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_unavailable()
    for item in items:
        if _HERE not in item.path.parents or item.path.name == _PURE:
            continue
        item.add_marker(pytest.mark.lab)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
