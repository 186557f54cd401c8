"""The command line: a module for each command or few small ones, put together in ``main``.

May import every torch-free package. Each command imports what it needs when it runs: the start stays fast,
and torch is never loaded into this process.
"""
