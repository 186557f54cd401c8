"""Runs an agent until a signal or `barnraise down`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from barnraise.agent.api import cluster_api
from barnraise.agent.cluster.admission import forsake
from barnraise.agent.cluster.join import join_by_psk
from barnraise.agent.daemon import Agent
from barnraise.core.config import Settings
from barnraise.core.errors import BarnraiseError, IdentityError
from barnraise.identity.private_file import read_private
from barnraise.pairing import Psk, parse_psk

_PSK_LOOK_S = 4.0

_log = logging.getLogger(__name__)

OnStart = Callable[[Agent], None]


def serve(
    settings: Settings,
    *,
    psk_file: Path | None = None,
    witness: bool = False,
    on_start: OnStart | None = None,
) -> int:
    """Returns the exit code; BarnraiseError if it cannot start."""
    psk = _read_psk(psk_file) if psk_file is not None else None
    # Not the default loop of Windows: a socket that it has touched cannot be handed over.
    with (
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
        contextlib.suppress(KeyboardInterrupt),
    ):
        return runner.run(_serve(settings, psk, witness, on_start))
    return 0


async def _serve(settings: Settings, psk: Psk | None, witness: bool, on_start: OnStart | None) -> int:
    agent = Agent(settings, witness=witness)
    agent.on_question = partial(cluster_api.answer, agent)
    await agent.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows raises KeyboardInterrupt instead
            asyncio.get_running_loop().add_signal_handler(number, agent.ended.set)
    if on_start is not None:
        on_start(agent)
    by_psk = asyncio.ensure_future(_use_psk(agent, psk)) if psk is not None else None
    try:
        await agent.ended.wait()
    finally:
        if by_psk is not None:
            by_psk.cancel()
        await agent.stop()
        if agent.leaves_for_good:
            forsake(agent.directory)
        _log.info("the agent has ended")
    return 0


async def _use_psk(agent: Agent, psk: Psk) -> None:
    """A machine alone looks for others with the key; a member admits those that come with it."""
    agent.hosts_alone = True  # of two that are alone and find each other, the smaller node id is joined
    agent.pairing.use_psk(psk)
    while len(agent.log.members) == 1:
        try:
            await join_by_psk(agent, psk, _PSK_LOOK_S)
        except BarnraiseError as error:
            _log.info("the pre-shared key has not opened the other machine: %s", error.message)
        await asyncio.sleep(random.uniform(0.2, 1.5))
    agent.hosts_alone = False


def _read_psk(path: Path) -> Psk:
    content = read_private(path)
    if content is None:
        raise IdentityError(
            f"there is no pre-shared key at {path}",
            hint="Make one on a machine of the cluster: barnraise psk new --output FILE; then copy the file.",
        )
    return parse_psk(content.decode("utf-8", "replace"))
