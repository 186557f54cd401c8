"""Remote calls between the workers of a run: functions registered by name, futures and remote references.

Nothing is pickled, and a name outside of the callee's registry runs nothing. Messages travel over the
encrypted links of the communication process, in one group of two ranks for each pair of workers.
May import ``worker`` and everything below it. Imports torch when it starts, not before.
"""

from barnraise.core.errors import RpcError
from barnraise.rpc.api import (
    call,
    call_async,
    reference,
    register,
    remote,
    remote_async,
    start,
    statistics,
    stop,
)
from barnraise.rpc.references import RemoteReference

__all__ = [
    "RemoteReference",
    "RpcError",
    "call",
    "call_async",
    "reference",
    "register",
    "remote",
    "remote_async",
    "start",
    "statistics",
    "stop",
]
