"""Rounds between sites over HTTPS: a hub keeps one model's chain, friends pull it, train and push updates.

May import ``compression`` and what is below it. ``messages``, ``signing``, ``invites``, ``rounds``,
``admission``, ``log``, ``blobs`` and ``app`` are importable without torch; it is loaded by those that merge.
"""
