"""Registers the ``barnraise`` backend and rendezvous with torch. ``import torch`` calls it by entry point.

In a process that ``barnraise run`` started it also lets unmodified scripts train in the cluster. Nothing
here may raise or be slow: a failure would break ``import torch`` in all programs on the machine.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

_registered = False
# torch keeps its own default for those that have one.
DEVICES = ("cpu", "cuda", "mps", "xpu")


def register() -> None:
    """Register the backend once. Calling it again does nothing."""
    global _registered
    if _registered:
        return
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if os.environ.get("BARNRAISE_LAUNCHED"):
            # First: if it fails, there is no backend over which a guest could send data. Other processes
            # ask when they create a group of ours, because `import torch` must stay fast.
            from barnraise.collectives.torch_patch.pickle_guard import install_pickle_guard
            from barnraise.core.logs.whole_lines import write_whole_lines

            install_pickle_guard()
            write_whole_lines()
        dist.Backend.register_backend("barnraise", _create, extended_api=True, devices=list(DEVICES))
        _registered = True
        _register_rendezvous()
        from barnraise.collectives.torch_patch.monitored_barrier import install_monitored_barrier

        install_monitored_barrier()
        if os.environ.get("BARNRAISE_LAUNCHED"):
            from barnraise.collectives.torch_patch.init_process_group import install

            install()
    except Exception as error:  # noqa: BLE001  # a script that does not use us must not fail
        import logging

        logging.getLogger("barnraise").warning("the barnraise backend could not be registered: %s", error)


def _register_rendezvous() -> None:
    """Register ``barnraise://``, and wrap ``env://`` for processes without an address."""
    rendezvous = import_module("torch.distributed.rendezvous")  # the package has a function of that name
    rendezvous.register_rendezvous_handler("barnraise", _meet)
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    original = handlers.get("env")
    if original is None:  # in this torch only barnraise:// works
        return

    def env(url: str, **options: Any) -> Any:
        if os.environ.get("MASTER_ADDR"):
            return original(url, **options)
        from barnraise.collectives.cluster_store import meet_or_fall_back

        return meet_or_fall_back(original, url, **options)

    handlers["env"] = env


def _meet(url: str, **options: Any) -> Any:
    from barnraise.collectives.cluster_store import cluster_rendezvous

    return cluster_rendezvous(url, **options)


def _create(request: Any, _: Any) -> Any:
    from barnraise.collectives.c10d.create import create_backend
    from barnraise.core.flow.console_log import install_console_log

    install_console_log()
    return create_backend(
        request.store,
        request.group_rank,
        request.group_size,
        request.timeout,
        enable_reconfigure=getattr(request, "enable_reconfigure", False),  # new in torch 2.15
    )
