"""Ranks on lab hosts: their start, their processes, and the operations that they time."""
