"""The attacker's process: it runs tools of an attacker in a host of the lab, and reports what they saw.

    python -m benchmarks.attacks.tools NAME '{"argument": value}'
    python -m benchmarks.attacks.tools serve '{"path": "/tmp/attacker", "seconds": 300}'

The second form accepts requests over a Unix socket, as lines of JSON. The scenes of ``benchmarks.attacks``
use it. Every tool stops by itself and reports its result as JSON. Tools without a key are in ``outsider``.
Those with a member's key are in ``guest``, ``runs``,
``checkpoints`` and ``removed_owner``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from typing import Any

from benchmarks.attacks.tools import checkpoints, guest, outsider, page, removed_owner, runs
from benchmarks.attacks.tools.toolbox import LIMIT_S, READY, TOOLS, Result

AUTHORS = (outsider, guest, page, runs, checkpoints, removed_owner)  # importing them makes their tools known


async def serve(path: str, seconds: float) -> Result:
    """Run what is asked for, several at a time, for so long."""

    async def answer(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        def say(words: object) -> None:
            sink.write(json.dumps(words).encode() + b"\n")

        READY.set(lambda: say("ready"))
        try:
            name, arguments = json.loads(await source.readline())
            say(await _run(name, arguments))
        except Exception:  # noqa: BLE001  # the caller receives it
            say({"failed": traceback.format_exc()})
        sink.close()

    async with await asyncio.start_unix_server(answer, path):
        await asyncio.sleep(seconds)
    return {}


async def _run(name: str, arguments: dict[str, Any]) -> Result:
    return await asyncio.wait_for(TOOLS[name](**arguments), LIMIT_S)


def main() -> int:
    name, arguments = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    os.nice(5)  # outside of the lab the attacker has its own processor
    limit_s = arguments["seconds"] if name == "serve" else LIMIT_S
    signal.alarm(int(limit_s) + 5)  # should the loop itself hang
    print(json.dumps(asyncio.run(serve(**arguments) if name == "serve" else _run(name, arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
