"""Benchmarks: what is promised about speed and failure, measured against Gloo in the same run.

Each module is run as ``python -m benchmarks.<name>`` and ends with one line of JSON figures.
May import Barnraise, the lab and torch; nothing imports it. Drivers never import torch, so that the
machine's cores belong to the ranks they start.
"""
