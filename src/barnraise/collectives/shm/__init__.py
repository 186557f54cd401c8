"""Shared memory between a worker and its communication process: segments, an allocator, torch views.

Commands about this memory are in ``messages``, copies in and out of it in ``ops``.
"""
