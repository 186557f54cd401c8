"""The mover: the process beside each worker that owns its sockets, TLS and sums.

Torch-free, started by ``python -m barnraise.collectives.mover``. ``engine`` decides what is sent and is free
of sockets and clocks; ``process`` gives it both.
"""
