"""``barnraise notify``: the targets that get notices about the runs of this machine."""
