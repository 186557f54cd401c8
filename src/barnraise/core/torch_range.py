"""Range of tested torch versions. Pure: torch itself is not imported."""

from __future__ import annotations

# pyproject.toml's extra says the same (a test compares them).
TESTED_RANGE = ">=2.13,<2.14"
TESTED_FIRST = (2, 13)
TESTED_BELOW = (2, 14)


def is_tested(version: str) -> bool:
    """Return True if a version such as ``2.13.0+cpu`` is in the tested range."""
    numbers = version.split("+")[0].split(".")
    try:
        release = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        return False
    return TESTED_FIRST <= release < TESTED_BELOW
