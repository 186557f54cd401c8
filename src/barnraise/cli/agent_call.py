"""Requests of a command to this machine's agent, and the offer to start the agent if none runs."""

from __future__ import annotations

import json
import os
import sys
from typing import TypeVar

import click
import msgspec

from barnraise.agent_client.bootstrap import standing_of, start_agent
from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import AgentRequest, AgentResponse, decode_response, encode
from barnraise.agent_client.history.requests import HistoryRequest
from barnraise.agent_client.queue.requests import QueueRequest
from barnraise.agent_client.run_requests import RunRequest
from barnraise.cli.terminal import is_terminal
from barnraise.cli.waiting import waiting
from barnraise.core.config import Settings, load_settings, state_directory
from barnraise.core.errors import AgentError, ListenerError

T = TypeVar("T", bound=AgentResponse)
_ANSWER_S = 20.0


def ask(
    question: AgentRequest | RunRequest | QueueRequest | HistoryRequest,
    expected: type[T],
    *,
    timeout_s: float = _ANSWER_S,
    offer_start: bool = True,
) -> T:
    """Return the agent's response. If no agent runs, offer to start one to a person at a terminal."""
    with _connect(offer_start=offer_start) as client:
        answer = decode_response(client.ask(encode(question), timeout_s))
    if not isinstance(answer, expected):
        raise AgentError(f"the agent answered {type(answer).__name__} to a {type(question).__name__}")
    return answer


def root_warning(user: int) -> str:
    """Return what it means that the agent runs as this user id; empty unless that is root. Pure."""
    if user != 0:
        return ""
    return "barnraise: the agent runs as root, so every owner of the cluster is root here"


def warn_of_root() -> None:
    """Print one line if the agent will have the rights of root."""
    if sys.platform == "win32":
        return
    if warning := root_warning(os.geteuid()):
        click.echo(warning, err=True)


def ensure_agent() -> None:
    """Start this machine's agent in the background if none runs, and say so."""
    settings = load_settings()
    standing = standing_of(state_directory(settings))
    if standing is not None and standing.agent:
        return
    warn_of_root()
    with waiting("Starting the agent on this machine"):
        pid = start_agent(settings)
    if pid is not None:
        click.echo("Started the agent on this machine; stop it with `barnraise down`.", err=True)


def offer_agent() -> None:
    """Raise AgentError if no agent runs; before, offer to start one to a person at a terminal."""
    _connect(offer_start=True).close()


def _connect(*, offer_start: bool) -> ListenerClient:
    settings = load_settings()
    try:
        return ListenerClient.connect(state_directory(settings))
    except ListenerError as error:
        if not offer_start or not _wants_start():
            raise AgentError(
                "no agent runs on this machine", hint="Start it: barnraise up --detach"
            ) from error
        return _start(settings)


def print_json(answer: AgentResponse) -> None:
    """Print a response for programs: one JSON object with every field that people see."""
    # msgspec writes null for NaN, which JSON does not have.
    click.echo(json.dumps(json.loads(msgspec.json.encode(answer)), indent=2))


def _wants_start() -> bool:
    return is_terminal(sys.stdin) and click.confirm(
        "No agent runs on this machine. Start it now?", default=True
    )


def _start(settings: Settings) -> ListenerClient:
    warn_of_root()
    with waiting("Starting the agent"):
        start_agent(settings)
    return ListenerClient.connect(state_directory(settings))
