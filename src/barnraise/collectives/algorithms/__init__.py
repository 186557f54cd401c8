"""Collective algorithms (ring, tree, star, ...) as pure compilers from an operation to a schedule.

Cost prediction and the choice of an algorithm belong here. Sockets, shared memory and torch do not.
"""
