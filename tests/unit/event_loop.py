"""An event loop that cannot start processes."""

from __future__ import annotations

import asyncio


class WithoutSubprocesses(asyncio.SelectorEventLoop):
    """Event loop as the agent's on Windows, which cannot start processes."""

    async def _make_subprocess_transport(self, *arguments: object, **options: object) -> None:
        raise NotImplementedError
