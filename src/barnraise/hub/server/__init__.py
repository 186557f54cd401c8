"""The hub's process: HTTP routes, uploads, connection limits, health and the hub object itself.

What a hub writes to its disk is in ``storage``; what it shows to people is in ``web``.
"""
