"""Client of this machine's listener (later: of its agent). Imports transport, identity and core."""

from backyard.local.client import ListenerClient
from backyard.local.starting import ensure_listener, register_worker

__all__ = ["ListenerClient", "ensure_listener", "register_worker"]
