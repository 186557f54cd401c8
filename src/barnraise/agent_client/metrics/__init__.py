"""Metrics between processes: workers hand theirs to the agent, and the command line asks for all of them."""
