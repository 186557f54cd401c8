"""Sandboxes for scripts of other people: what a script sees of this machine, and which system confines it.

Nothing here knows of runs, hubs or agents. They describe what a script needs (`spec`), and start the command
that this package returns.
"""
