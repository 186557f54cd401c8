"""Commands about the cluster: up, pair, join, status, and changes of its members."""
