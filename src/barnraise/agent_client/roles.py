"""Question of a worker to its agent: which machines of the cluster are owners' and which are guests'."""

from __future__ import annotations

from barnraise.agent_client.bootstrap import standing_of
from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import decode_response, encode
from barnraise.agent_client.run_requests import RolesRequest, RolesResponse
from barnraise.core.config import Settings, state_directory
from barnraise.core.errors import AgentError

_ANSWER_S = 30.0


def ask_roles(settings: Settings, run: str, *, launched: bool) -> RolesResponse | None:
    """Return the roles in the cluster; None if no agent serves this machine, because trust is then a setting.

    ``run``: the run of this process; empty if it has none. ``launched``: an agent started the process, so one
    must answer. Silence of an agent is an error: it must not be taken for a cluster without guests.
    """
    directory = state_directory(settings)
    if not launched:
        standing = standing_of(directory)
        if standing is None or not standing.agent:
            return None
    with ListenerClient.connect(directory) as client:
        reply = decode_response(client.ask(encode(RolesRequest(run)), _ANSWER_S))
    if not isinstance(reply, RolesResponse):
        raise AgentError("the agent did not answer which machines are guests")
    return reply
