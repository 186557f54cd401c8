"""Wire protocol of hub and members: messages, signatures, invites, TLS and the vector file format.

HTTP routes are in ``server``, HTTP calls in ``client``.
"""
