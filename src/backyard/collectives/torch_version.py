"""Which torch this was tested with; that another was not is said once. Torch-free itself."""

from __future__ import annotations

import logging

from backyard.collectives.announcements import first_time

log = logging.getLogger("backyard.collectives")

TESTED_FIRST = (2, 13)
TESTED_BELOW = (2, 14)


def is_tested(version: str) -> bool:
    """Whether a version such as ``2.13.0+cpu`` lies in the range that was tested."""
    numbers = version.split("+")[0].split(".")
    try:
        release = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        return False
    return TESTED_FIRST <= release < TESTED_BELOW


def warn_if_untested(version: str) -> None:
    if not is_tested(version) and first_time(("torch", version)):
        log.warning(
            "torch %s was not tested with Backyard, only %d.%d was; `backyard torch` prints the command "
            "that installs a tested one",
            version,
            *TESTED_FIRST,
        )
