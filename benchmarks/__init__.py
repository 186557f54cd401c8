"""Benchmarks: what is promised about speed and failure, measured against Gloo in the same run.

A folder holds one subject. A command such as ``python -m benchmarks.session`` or
``python -m benchmarks.session.soak`` prints one line of JSON figures at its end.
May import Barnraise, the lab, helpers of the tests and torch. Drivers never import torch, so that the
machine's cores belong to the ranks they start.
"""
