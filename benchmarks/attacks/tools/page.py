"""Attacks on the page of an agent: raw requests and floods, as any user of the machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.attacks.tools.toolbox import Result, connect, say, tool

_ANSWER_S = 10.0


def request_text(
    method: str, path: str, headers: Mapping[str, str], body: str = "", *, host: str = "127.0.0.1"
) -> bytes:
    """Return an HTTP request with exactly these headers, and a Host unless they have one."""
    given = {"Host": host, **headers}
    if method == "POST":
        given.setdefault("Content-Length", str(len(body)))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n{body}".encode()


@tool
async def visit_page(
    port: int, requests: Sequence[dict[str, Any]], host: str = "127.0.0.1", user: int = -1
) -> Result:
    """Send requests, as another user if ``user`` is one; return status and text of each answer."""
    _become(user)
    answers = []
    for each in requests:
        text = request_text(each["method"], each["path"], each.get("headers", {}), each.get("body", ""))
        heard = await say(host, port, text, _ANSWER_S)
        status = heard.split(b" ", 2)[1].decode() if heard.startswith(b"HTTP/1.1 ") else "none"
        answers.append([status, heard.decode("utf-8", "replace")])
    return {"answers": answers, "user": os.geteuid()}


@tool
async def flood_page(port: int, count: int, words: str, seconds: float, user: int = -1) -> Result:
    """Hold many connections open, and send a byte of a request on each now and then."""
    _become(user)
    lines = [line for line in [await connect("127.0.0.1", port) for _ in range(count)] if line is not None]
    deadline = asyncio.get_running_loop().time() + seconds
    place = 0
    while asyncio.get_running_loop().time() < deadline:
        for _, sink in lines:
            if not sink.is_closing():
                sink.write(words[place % len(words)].encode())
        place += 1
        await asyncio.sleep(0.3)
    held = sum(not sink.is_closing() for _, sink in lines)
    for _, sink in lines:
        sink.transport.abort()
    return {"opened": len(lines), "held": held}


def _become(user: int) -> None:
    """Drop the rights of root. The interpreter may be in a folder of root, so this comes after its start."""
    if user >= 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
