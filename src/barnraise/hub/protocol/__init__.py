"""What hub and members share on the wire: messages, signatures, invites, TLS and the vector file format.

HTTP routes are in ``server``, HTTP calls in ``client``.
"""
