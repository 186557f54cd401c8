"""Refuses torch's own RPC where it is unsafe: in a run with a guest, and in plaintext between machines.

It opens connections of its own, which are neither encrypted nor authenticated, and unpickles what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from barnraise.core.errors import CollectiveError, UnsupportedOperation
from barnraise.runs.backend_choice import TRUSTED

_INSTEAD = "Use remote calls of barnraise.rpc, which are encrypted and pickle nothing (docs/rpc.md)."


def refuse_rpc(make_error: Callable[[], CollectiveError]) -> None:
    """Make torch's ``init_rpc`` raise this error. An earlier refusal stays."""
    from torch.distributed import rpc

    if not rpc.is_available() or isinstance(rpc._init_rpc_backend, _Refusal):
        return
    rpc._init_rpc_backend = _Refusal(make_error)  # its init_rpc calls this


def refuse_rpc_in_plaintext(environment: Mapping[str, str]) -> None:
    """Refuse torch's RPC if the run has several machines, unless it trusts the network between them.

    ``environment``: the variables of a worker.
    """
    machines = set(environment.get("BARNRAISE_MACHINES", "").split(","))
    if len(machines) > 1 and environment.get("BARNRAISE_FABRIC") != TRUSTED:
        refuse_rpc(_plaintext_error)


class _Refusal:
    """Function that raises an error, in the place of one of torch."""

    def __init__(self, make_error: Callable[[], CollectiveError]) -> None:
        self._make_error = make_error

    def __call__(self, *_: Any, **__: Any) -> None:
        raise self._make_error()


def _plaintext_error() -> CollectiveError:
    return UnsupportedOperation(
        "torch's RPC is not used between machines: it sends plaintext, and any sender can run code",
        hint=f"{_INSTEAD} In a network that you trust: barnraise run --trust-fabric.",
    )
