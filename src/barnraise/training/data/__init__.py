"""Data loading: wraps the script's DataLoader and serves it one micro-batch at a time.

Which worker computes which micro-batch is decided in `steps`.
"""
