"""``backyard.init``: the session of this process, and the hub whose rounds it takes part in, if any."""

from __future__ import annotations

import os

from backyard.core.errors import HubError
from backyard.training.beyond import Beyond
from backyard.training.choosing import Wish
from backyard.training.session import Session
from backyard.training.session import init as begin_session
from backyard.training.sync import Sync


def init(
    *,
    seed: int = 0,
    unit: int = 0,
    checkpoint_s: float = 60.0,
    copies: int = 2,
    mixed: bool = False,
    sync: Wish | Sync | None = None,
) -> Session:
    """The session of this process.

    ``unit``: samples of a canonical micro-batch (0: an eighth of a batch). Every ``checkpoint_s`` seconds the
    state is saved, on the disks of ``copies`` machines. Machines whose processors compute
    differently are noticed; ``mixed`` says so where only the optimizer at hand does. ``sync``: "exact"; or
    "auto", to let the planner choose codecs and local steps too; or a `Sync`. None: as the run was started.
    In a process that ``backyard join --invite`` started, the hub decides how all stay together.
    """
    return begin_session(
        seed=seed,
        unit=unit,
        checkpoint_s=checkpoint_s,
        copies=copies,
        mixed=mixed,
        sync=sync,
        beyond=_hub() if os.environ.get("BACKYARD_HUB") else None,
    )


def _hub() -> Beyond:
    try:
        from backyard.worker.hub_rounds import rounds_from_environment
    except ModuleNotFoundError as error:
        raise HubError(
            f"what a hub needs is not installed here: {error.name}",
            hint='Run: pip install "backyard[hub]"',
        ) from error
    return rounds_from_environment()
