"""Client of what serves this machine: its agent, or the plain listener of a run without one.

Imports transport, identity and core.
"""

from barnraise.local.client import ListenerClient
from barnraise.local.starting import ensure_listener, register_worker

__all__ = ["ListenerClient", "ensure_listener", "register_worker"]
