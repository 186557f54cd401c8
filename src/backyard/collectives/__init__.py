"""The ``backyard`` c10d backend: torch's collectives over authenticated links, moved by a process of our own.

May import ``runs``, ``planning`` and everything below them. torch is imported only by ``backend``, ``work``,
``staging``, ``options`` and ``batch_norm``; the rest, the mover above all, is torch-free.
"""
