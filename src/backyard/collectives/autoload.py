"""Makes ``init_process_group("backyard")`` known to torch. Called by ``import torch`` through an entry point.

Nothing here may raise or be slow: a failure would break ``import torch`` for every program on the machine.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

_registered = False


def register() -> None:
    """Register the backend once; harmless when called again."""
    global _registered
    if _registered:
        return
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        dist.Backend.register_backend("backyard", _create, devices=["cpu", "cuda", "mps"])
        _registered = True
    except Exception as error:  # noqa: BLE001  # a program that does not use us must not notice
        import logging

        logging.getLogger("backyard").warning("the backyard backend could not be registered: %s", error)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from backyard.collectives.backend import create_group

    return create_group(store, rank, size, timeout)
