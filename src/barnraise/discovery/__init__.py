"""How machines find each other: ways to look, each a file behind one port, and the service that runs them.

May import ``local``, ``transport``, ``identity`` and ``core``; never torch. The ways themselves (``mdns``,
``broadcast``, ``static``, ``remembered``) are imported by whoever composes them: some are costly to load.
"""

from barnraise.discovery.finder import UNTAGGED, Finder, Sighting
from barnraise.discovery.namespace import namespace_tag
from barnraise.discovery.service import Discovery

__all__ = ["UNTAGGED", "Discovery", "Finder", "Sighting", "namespace_tag"]
