"""``barnraise.wait_for_peers``: wait in a script until enough machines are here."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from barnraise.agent_client.kv_client import Connect, agent_at, ask_cluster
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import AgentError, ListenerError, MembershipError

log = logging.getLogger("barnraise")

_POLL_S = 0.3
_SAY_S = 10.0


def wait_for_peers(n: int, timeout: float | timedelta = 600.0) -> int:
    """Return how many machines take work, once they are ``n`` or more, this one included.

    MembershipError at the deadline; AgentError or ListenerError if no agent answers on this machine.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return _wait(agent_at(state_directory(load_settings())), n, seconds)


def _wait(connect: Connect, wanted: int, seconds: float) -> int:
    begin = time.monotonic()
    here, logged_at = ask_cluster(connect).world, begin
    while here < wanted:
        now = time.monotonic()
        if now >= begin + seconds:
            raise MembershipError(
                f"{here} of {wanted} machines were here after {seconds:g} s",
                hint="Start the agents of the others (`barnraise up`) and look at `barnraise status`.",
            )
        if now >= logged_at + _SAY_S:
            logged_at = now
            log.warning("waiting for machines: %d of %d are here after %.0f s", here, wanted, now - begin)
        time.sleep(min(_POLL_S, begin + seconds - now))
        try:
            here = ask_cluster(connect).world
        except (AgentError, ListenerError) as error:  # it may be starting again; the deadline holds
            log.debug("the agent does not say how many are here: %s", error)
    return here
