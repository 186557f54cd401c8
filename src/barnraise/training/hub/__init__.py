"""Training with a hub: a group leases samples, trains them, and exchanges its change for the next version.

The hub itself and its HTTP client are in `barnraise.hub`; the adapter between both is in `worker`.
"""
