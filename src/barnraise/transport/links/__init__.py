"""Links between workers: frames over TCP, with TLS or in the clear, and parallel streams.

The collective operations that use them belong in ``collectives``.
"""
