"""Targets of notifications, and requests about them."""
