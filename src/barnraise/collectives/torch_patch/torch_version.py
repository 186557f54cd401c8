"""Warning about a torch version that was not tested. Torch-free itself."""

from __future__ import annotations

import logging

from barnraise.core.flow.log_once import first_time
from barnraise.core.installation import TESTED_RANGE, is_tested, release_of

log = logging.getLogger("barnraise.collectives")


_PYTHON_BACKENDS = (2, 15)


def has_python_backends(version: str) -> bool:
    """Return True if a class in Python can be a backend object of torch's own process group."""
    return release_of(version) >= _PYTHON_BACKENDS


def warn_if_untested(version: str) -> None:
    if not is_tested(version) and first_time(("torch", version)):
        log.warning(
            "torch %s was not tested with Barnraise, only %s was; `barnraise torch` prints the command "
            "that installs a tested one",
            version,
            TESTED_RANGE,
        )
