"""Foundation of every package: errors, settings, units, metrics, files, OS commands and device figures.

Nothing in it imports another package of Barnraise. Waiting, retrying and rate limits are in ``core.flow``.
"""
