"""Authenticated, encrypted links between machines: preface, TLS, frames, the listener and an in-memory twin.

May import ``identity`` and ``core``; never torch.
"""
