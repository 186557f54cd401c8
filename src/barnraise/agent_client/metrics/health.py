"""``barnraise.health``: the health of this machine's agent, for a program that monitors it."""

from __future__ import annotations

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import decode_response, encode
from barnraise.agent_client.metrics.requests import HealthRequest, HealthResponse
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import AgentError, ListenerError, ProtocolError


def health(timeout: float = 5.0) -> HealthResponse:
    """Return the health of this machine's agent; it is failing if no agent answers within ``timeout``."""
    try:
        with ListenerClient.connect(state_directory(load_settings()), timeout) as client:
            answer = decode_response(client.ask(encode(HealthRequest()), timeout))
    except ListenerError:
        return _failing("no agent runs on this machine: start it with `barnraise up --detach`")
    except (AgentError, ProtocolError) as error:
        return _failing(error.message)
    if not isinstance(answer, HealthResponse):
        return _failing(f"the agent answered {type(answer).__name__} instead of its health")
    return answer


def _failing(problem: str) -> HealthResponse:
    return HealthResponse(state="failing", problems=(problem,))
