"""That the installed torch was not tested is said once. Torch-free itself."""

from __future__ import annotations

import logging

from backyard.collectives.announcements import first_time
from backyard.core.torch_range import TESTED_FIRST, is_tested

log = logging.getLogger("backyard.collectives")


def warn_if_untested(version: str) -> None:
    if not is_tested(version) and first_time(("torch", version)):
        log.warning(
            "torch %s was not tested with Backyard, only %d.%d was; `backyard torch` prints the command "
            "that installs a tested one",
            version,
            *TESTED_FIRST,
        )
