"""The end of this worker as if it had been killed: the others go on, and its machine may start it again."""

from __future__ import annotations

import logging
import os
import signal
import sys

log = logging.getLogger("barnraise.training")


def end_as_killed() -> None:
    """Nothing of the script can catch it and go on beside the run, and it is not taken for a good end."""
    sys.stderr.flush()
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def end_without_state(*, finished: bool) -> None:
    """Nobody is left who could give it to this newcomer; ``finished``: because the training is over."""
    if finished:
        log.warning("the others have finished before this worker could join them")
    else:
        log.error("everybody who had the state is gone; this worker ends, to begin with a checkpoint")
    end_as_killed()
