"""This machine's part in the cluster: connections, discovery, pairing, admission, store, link probes.

What members agree on is decided in `barnraise.membership` and `barnraise.kvstore`.
"""
