"""Discovery of other machines: finders behind one interface, and the service that runs them.

The finders (``mdns``, ``broadcast``, ``static``, ``remembered``) are imported by the code that composes them,
because some are slow to load. Proof of identity belongs in ``transport``. Never imports torch.
"""

from barnraise.discovery.finder import UNTAGGED, Finder, Sighting
from barnraise.discovery.namespace import namespace_tag
from barnraise.discovery.service import Discovery

__all__ = ["UNTAGGED", "Discovery", "Finder", "Sighting", "namespace_tag"]
