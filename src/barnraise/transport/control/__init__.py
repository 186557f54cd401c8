"""Control connections between agents: dial, accept, framing and TLS on an asyncio loop.

The messages themselves belong in ``agent`` and ``membership``.
"""
