"""The verbs that change the cluster or end the agent: down, unpair, rename, continue, psk."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from barnraise.agent_client.bootstrap import standing_of
from barnraise.agent_client.cluster_requests import (
    AgentRequest,
    ContinueRequest,
    LeaveRequest,
    NodeRow,
    PskRequest,
    RenameRequest,
    RequestDone,
    ShutdownRequest,
    StatusRequest,
    StatusResponse,
    UnpairRequest,
)
from barnraise.cli.agent_call import ask, print_json
from barnraise.cli.terminal import is_terminal
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import AgentError, IdentityError, MembershipError
from barnraise.core.names import NamedItem, match_name
from barnraise.core.sanitize import printable
from barnraise.identity.private_file import create_private

_END_S = 15.0
_DECIDE_S = 60.0


def down(*, as_json: bool) -> int:
    """End the agent and wait until it has said goodbye."""
    return _tell(end_agent(ShutdownRequest()), as_json)


def leave(*, yes: bool, as_json: bool) -> int:
    """End the agent and forget the cluster."""
    confirm("Leave the cluster permanently? To return, this machine must pair again.", yes or as_json)
    return _tell(end_agent(LeaveRequest()), as_json)


def end_agent(question: ShutdownRequest | LeaveRequest) -> RequestDone:
    """Ask the agent to stop, and wait until it has stopped."""
    done = ask(question, RequestDone, offer_start=False)
    directory = state_directory(load_settings())
    deadline = time.monotonic() + _END_S
    while (standing := standing_of(directory)) is not None and standing.agent:
        if time.monotonic() > deadline:
            raise AgentError(
                f"the agent (pid {standing.pid}) still runs after {_END_S:g} s",
                hint="Look at its log; end it with its process id if it hangs.",
            )
        time.sleep(0.05)
    return done


def unpair(*, node: str, yes: bool, as_json: bool) -> int:
    """Remove a machine from the cluster permanently. The question names its id: names can look alike."""
    if not yes and not as_json:
        row = _find(node)
        name = f"{printable(row.name)} ({row.short})"
        confirm(f"Remove {name} permanently? To return, it must leave and pair again.", agreed=False)
        node = row.node
    return _do(UnpairRequest(node), as_json)


def _find(text: str) -> NodeRow:
    rows = ask(StatusRequest(), StatusResponse).nodes
    named = [NamedItem(row.name, row, (row.short, row.node)) for row in rows]
    match = match_name(text, named, kind="machine", exact=True)
    if match.value is None:
        raise MembershipError(match.problem, hint=match.hint)
    return match.value


def rename(*, name: str, as_json: bool) -> int:
    return _do(RenameRequest(name), as_json)


def go_on(*, without: list[str], as_json: bool) -> int:
    """Continue without these machines: the user states that they are gone."""
    return _do(ContinueRequest(tuple(without)), as_json)


def new_psk(*, guest: bool, output: Path | None, as_json: bool) -> int:
    """Make a pre-shared key; to a file of mode 0600, or to standard output."""
    done = ask(PskRequest("guest" if guest else "owner"), RequestDone)
    if output is not None:
        if not create_private(output.resolve(), done.secret.encode() + b"\n"):
            raise IdentityError(f"{output} exists already", hint="Choose another file name.")
        click.echo(f"{done.sentence}; it is in {output} (keep it secret)")
        click.echo(f"On the other machine: barnraise up --psk-file {output.name}")
    elif as_json:
        print_json(done)
    else:
        click.echo(done.secret)
        click.echo(f"{done.sentence}; keep it secret", err=True)
    return 0


def confirm(question: str, agreed: bool) -> None:
    """Ask a person, unless the person has agreed; raise AgentError if none is at the terminal."""
    if agreed:
        return
    if not is_terminal(sys.stdin):
        raise AgentError("this cannot be undone and needs a confirmation", hint="Add --yes to confirm.")
    click.confirm(question, abort=True)


def _do(question: AgentRequest, as_json: bool) -> int:
    return _tell(ask(question, RequestDone, timeout_s=_DECIDE_S), as_json)


def _tell(done: RequestDone, as_json: bool) -> int:
    if as_json:
        print_json(done)
    else:
        click.echo(done.sentence)
    return 0
