"""``barnraise.launch``: send one function to the cluster, run it on every rank, return a result."""
