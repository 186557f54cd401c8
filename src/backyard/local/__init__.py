"""Client of what serves this machine: its agent, or the plain listener of a run without one.

Imports transport, identity and core.
"""

from backyard.local.client import ListenerClient
from backyard.local.starting import ensure_listener, register_worker

__all__ = ["ListenerClient", "ensure_listener", "register_worker"]
