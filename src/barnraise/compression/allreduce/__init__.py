"""TODO: allreduce."""
