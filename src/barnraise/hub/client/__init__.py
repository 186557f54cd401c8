"""A member's side of a hub: HTTP client, training loop, transfers, bandwidth policy and credentials.

Nothing here runs in the hub's own event loop; regions and mirrors use it to talk to their hub.
"""
