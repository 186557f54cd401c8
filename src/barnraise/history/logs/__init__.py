"""Logs as a whole: parts of their columns, smaller versions of them, and which to copy. Pure."""
