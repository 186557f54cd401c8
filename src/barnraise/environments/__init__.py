"""Python environments of runs: what a script imports, what machines have, and how environments are built.

May import ``topology`` and what is below it. Starting workers does not belong here.
"""
