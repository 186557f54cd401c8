"""Waiting, retrying and limiting: pure where possible, with clocks and sleeps passed in.

Anything that knows about machines, runs or messages belongs in the package that uses it.
"""
