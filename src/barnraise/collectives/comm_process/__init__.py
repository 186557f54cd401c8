"""The mover: the process beside each worker that owns its sockets, TLS and sums.

Torch-free, started by ``python -m barnraise.collectives.comm_process``. ``engine`` decides what is sent; free
of sockets and clocks; ``process`` gives it both.
"""
