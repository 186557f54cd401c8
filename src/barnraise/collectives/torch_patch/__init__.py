"""Changes to torch in a running process: backend registration, wrapped functions, the pickle guard.

The process group itself and its store do not belong here.
"""
