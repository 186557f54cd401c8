"""Warning about a torch version that was not tested. Torch-free itself."""

from __future__ import annotations

import logging

from barnraise.core.flow.log_once import first_time
from barnraise.core.installation import TESTED_FIRST, is_tested

log = logging.getLogger("barnraise.collectives")


def warn_if_untested(version: str) -> None:
    if not is_tested(version) and first_time(("torch", version)):
        log.warning(
            "torch %s was not tested with Barnraise, only %d.%d was; `barnraise torch` prints the command "
            "that installs a tested one",
            version,
            *TESTED_FIRST,
        )
