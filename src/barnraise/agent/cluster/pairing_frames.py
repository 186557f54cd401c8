"""Length-prefixed messages of a pairing over a plain socket, for both sides."""

from __future__ import annotations

import asyncio
import socket
import struct

from barnraise.core.errors import PairingError

STEP_S = 10.0
_LENGTH = struct.Struct("<I")


async def send_message(connection: socket.socket, message: bytes) -> None:
    """Send one message; raise TimeoutError if the peer does not take it in time."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(STEP_S):
        await loop.sock_sendall(connection, _LENGTH.pack(len(message)) + message)


async def receive_message(connection: socket.socket, limit: int, timeout_s: float) -> bytes:
    """Receive one message; raise PairingError if it is longer than ``limit``."""
    async with asyncio.timeout(timeout_s):
        (length,) = _LENGTH.unpack(await receive_exactly(connection, _LENGTH.size))
        if length > limit:
            raise PairingError(f"a pairing message of {length} bytes is too long; the limit is {limit}")
        return await receive_exactly(connection, length)


async def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Receive ``count`` bytes; raise ConnectionResetError if the peer closes the connection before."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < count:
        data = await loop.sock_recv(connection, min(count - len(received), 1 << 16))
        if not data:
            raise ConnectionResetError("the other machine closed the connection")
        received += data
    return bytes(received)
