"""Process groups of ours as torch sees them: one for every torch, and one with hooks from torch 2.15 on.

All inherit their operations from one class. May import the rest of ``collectives``.
"""
