"""Recorder of a training: each commit becomes a row of the run's record.

A commit only appends to a queue. A thread encodes the rows about once a second and gives them to
the agent. A process that no agent has started writes them to a log of its own.
"""
