"""Recorder of a training: each commit becomes a row of the run's record.

A commit only appends to a queue. A thread encodes the rows about once a second and gives them to the agent,
or writes them to the log of a process that no agent has started.
"""
