"""Client of what serves this machine: its agent, or the plain listener of a run without one.

Imports transport, identity and core.
"""

from barnraise.agent_client.bootstrap import ensure_listener, register_worker
from barnraise.agent_client.client import ListenerClient

__all__ = ["ListenerClient", "ensure_listener", "register_worker"]
