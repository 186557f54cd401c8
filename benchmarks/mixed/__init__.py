"""Machines of different systems that train together."""
