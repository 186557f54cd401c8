"""Mirrors: a copy of a hub that serves its versions and can take over from it."""
