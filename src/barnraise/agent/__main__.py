"""``python -m barnraise.agent``: runs the agent without a display, until a signal or `barnraise down`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from barnraise.agent.api import cluster_api
from barnraise.agent.cluster.admission import forget_cluster, use_next_key
from barnraise.agent.cluster.join import join_by_psk
from barnraise.agent.daemon import Agent
from barnraise.agent_client.bootstrap import AGENT_LOG
from barnraise.core.config import Settings, load_settings
from barnraise.core.errors import BarnraiseError, IdentityError
from barnraise.core.flow.console_log import install_process_log
from barnraise.core.flow.termination import stop_by_signals
from barnraise.core.logs.rotation import rotate_output
from barnraise.core.sanitize import printable
from barnraise.identity.private_file import read_private
from barnraise.pairing import Psk, parse_psk

_PSK_SEARCH_S = 4.0
_ROTATE_S = 600.0

_log = logging.getLogger(__name__)

OnStart = Callable[[Agent], None]


def main() -> int:
    """Run the agent with the options of the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="barnraise-agent", description="This machine's agent.")
    parser.add_argument("--psk-file", type=Path)
    parser.add_argument("--witness", action="store_true")
    options = parser.parse_args()
    install_process_log()
    logging.getLogger("zeroconf").setLevel(logging.ERROR)
    try:
        return serve(load_settings(), psk_file=options.psk_file, witness=options.witness)
    except BarnraiseError as error:
        print(printable(str(error), also="\n"), file=sys.stderr)  # noqa: T201  # nothing else shows it yet
        return 1


def serve(
    settings: Settings,
    *,
    psk_file: Path | None = None,
    witness: bool = False,
    on_start: OnStart | None = None,
) -> int:
    """Run an agent until it is stopped, and return the exit code; raise BarnraiseError if it cannot start."""
    psk = _read_psk(psk_file) if psk_file is not None else None
    # Not the default loop of Windows: a socket that it has used cannot be passed to another process.
    with (
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
        contextlib.suppress(KeyboardInterrupt),
    ):
        return runner.run(_serve(settings, psk, witness, on_start))
    return 0


async def _serve(settings: Settings, psk: Psk | None, witness: bool, on_start: OnStart | None) -> int:
    while await _serve_once(Agent(settings, witness=witness), psk, on_start):
        _log.info("the agent starts again with its new key")
    return 0


async def _serve_once(agent: Agent, psk: Psk | None, on_start: OnStart | None) -> bool:
    """Run an agent until it is stopped; return True if it must start again because its key has changed."""
    agent.on_request = partial(cluster_api.answer, agent)
    await agent.start()
    stop_by_signals(asyncio.get_running_loop(), agent.stop_requested.set)
    if on_start is not None:
        on_start(agent)
    agent.spawn(_rotate_log(agent.directory / AGENT_LOG))
    psk_task = asyncio.ensure_future(_join_or_admit(agent, psk)) if psk is not None else None
    try:
        await agent.stop_requested.wait()
    finally:
        if psk_task is not None:
            psk_task.cancel()
        await agent.stop()
        if agent.leaves_cluster:
            forget_cluster(agent.directory)
        if agent.changes_key:
            use_next_key(agent.directory)
        _log.info("the agent has stopped")
    return agent.changes_key


async def _rotate_log(path: Path) -> None:
    """Rotate the log of this process whenever it is full, if its output goes there."""
    while True:
        rotate_output(sys.stderr.fileno(), path)
        await asyncio.sleep(_ROTATE_S)


async def _join_or_admit(agent: Agent, psk: Psk) -> None:
    """Admit machines that have the key; while this machine is alone, search for one to join."""
    agent.is_alone_with_psk = True  # of two lone machines that find each other, the smaller node id is joined
    agent.pairing.use_psk(psk)
    while len(agent.log.members) == 1:
        try:
            await join_by_psk(agent, psk, _PSK_SEARCH_S)
        except BarnraiseError as error:
            _log.info("cannot pair with the pre-shared key: %s", error.message)
        await asyncio.sleep(random.uniform(0.2, 1.5))
    agent.is_alone_with_psk = False


def _read_psk(path: Path) -> Psk:
    content = read_private(path)
    if content is None:
        raise IdentityError(
            f"there is no pre-shared key at {path}",
            hint="Make one on a machine of the cluster: barnraise psk new --output FILE; then copy the file.",
        )
    return parse_psk(content.decode("utf-8", "replace"))


if __name__ == "__main__":
    sys.exit(main())
