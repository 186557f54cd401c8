"""Listener of a machine: its TCP port, the preface check, and delivery to workers or the agent.

Messages between agents belong in ``control``, local messages in ``ipc``.
"""
