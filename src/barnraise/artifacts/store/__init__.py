"""Content-addressed store of a machine: objects, manifests, links and garbage collection.

Reading folders belongs in ``packing``, the network in ``transfer``.
"""
