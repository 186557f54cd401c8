"""Establishing links to other workers: dialling, handshakes, and joins that arrive before their group opens.

Frames on established links belong to ``engine`` and its neighbours.
"""
