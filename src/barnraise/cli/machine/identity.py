"""``barnraise id`` and ``barnraise identity rotate``: the identity of this machine, and a new key for it."""

from __future__ import annotations

import time

import click

from barnraise.agent_client.bootstrap import standing_of
from barnraise.agent_client.cluster_requests import RequestDone, RotateKeyRequest
from barnraise.cli.agent_call import ask, print_json
from barnraise.cli.cluster.members import confirm
from barnraise.cli.waiting import waiting
from barnraise.core.config import Settings, load_settings, state_directory
from barnraise.core.errors import AgentError
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId

_DECIDE_S = 120.0
_START_S = 60.0
_POLL_S = 0.1


def run() -> None:
    """Print the node id alone on standard output, so that it can be copied or piped."""
    click.echo(str(machine_key(load_settings()).id))


def machine_key(settings: Settings) -> NodeKey:
    """Return this machine's key, and create it if there is none yet."""
    return NodeKey.load_or_create(state_directory(settings) / "node.key")


def rotate(*, yes: bool, as_json: bool) -> int:
    """Give this machine a new key, and wait until its agent runs with it."""
    question = "Replace this machine's key? The old one is dead afterwards, and workers here start again."
    confirm(question, yes or as_json)
    settings = load_settings()
    before = machine_key(settings).id
    with waiting("Asking the cluster to decide for the new key"):
        done = ask(RotateKeyRequest(), RequestDone, timeout_s=_DECIDE_S)
    deadline = time.monotonic() + _START_S
    with waiting("Starting the agent with the new key"):
        while not _runs_as_another(settings, before):
            if time.monotonic() > deadline:
                raise AgentError(
                    f"the agent did not start again within {_START_S:g} s",
                    hint="Start it: barnraise up --detach",
                )
            time.sleep(_POLL_S)
    if as_json:
        print_json(done)
    else:
        click.echo(done.sentence)
    return 0


def _runs_as_another(settings: Settings, before: NodeId) -> bool:
    if machine_key(settings).id == before:
        return False
    standing = standing_of(state_directory(settings))
    return standing is not None and standing.agent
