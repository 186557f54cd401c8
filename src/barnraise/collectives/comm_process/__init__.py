"""The communication process: the helper process of a worker that owns its sockets, TLS and sums.

It is torch-free and started by ``python -m barnraise.collectives.comm_process``. ``engine`` decides what is
sent, without sockets and clocks; ``process`` runs the event loop around it.
"""
