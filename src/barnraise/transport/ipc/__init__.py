"""Communication between processes of one machine: local socket, messages, and passing of sockets.

Requests for the agent belong in ``agent_client``.
"""
