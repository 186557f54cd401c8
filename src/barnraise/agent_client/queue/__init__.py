"""Requests about the queue of jobs, from the command line to this machine's agent."""
