"""Foundation of every package: errors, settings, units, metrics, files and OS commands.

Nothing in it imports another package of Barnraise. Waiting, retrying and rate limits are in ``core.flow``.
"""
