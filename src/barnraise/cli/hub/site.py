"""``barnraise join --invite --site``: all machines of this cluster train for a hub as one member.

The script starts on them as a run, which stops with this command. The first rank of the group talks to the
hub, with the credentials of this machine. Only owners' machines get these credentials.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from barnraise.agent_client.run_options import MAX_TITLE, RunOptions, RunProgram
from barnraise.agent_client.run_requests import RunStarted, StartRunRequest
from barnraise.artifacts import ArtifactStore, folder_limits, pack, store_directory
from barnraise.cli.agent_call import ask
from barnraise.cli.child_process import say
from barnraise.cli.hub.join import CONTRIBUTING_VARIABLES, JoinedHub
from barnraise.cli.runs.run import bring_results, needs_in, python_sources, say_end
from barnraise.cli.runs.run_view import watch
from barnraise.core.config import Settings, state_directory
from barnraise.core.errors import HubError
from barnraise.core.flow.termination import on_termination

if TYPE_CHECKING:
    from barnraise.hub.client.credentials import MemberCredentials

_START_S = 50.0
_LEAVE_S = 10.0


def train_site(contributor: JoinedHub, settings: Settings, *, keep: Path | None, quiet: bool) -> int:
    """Train until the run stops or Ctrl-C is pressed, and return the exit code."""
    on_termination(signal.default_int_handler)
    store = ArtifactStore(store_directory(state_directory(settings)))
    run = _start(contributor, store, settings, quiet=quiet)
    row = watch(run, all_ranks=False, stops=True)
    _leave(contributor.credentials)  # only now: while any machine of the site trained, the lease was in use
    if keep is not None:
        bring_results(run, store, keep)
    code = say_end(row)
    if code:
        say("this site has left; the same line joins again")
    return code


def _leave(credentials: MemberCredentials) -> None:
    from barnraise.hub.client.client import HubClient
    from barnraise.hub.protocol.messages import RunDescription

    with contextlib.closing(
        HubClient(
            credentials.addresses,
            credentials.hub_id,
            credentials.member_key,
            pinned=credentials.pinned,
            say=say,
            proxy_token=credentials.proxy_token,
            led_from=credentials.led_from,
        )
    ) as client:
        try:
            client.ask_with_retries("POST", "/v1/leave", RunDescription, patience_s=_LEAVE_S)
        except HubError as error:
            say(f"the lease could not be given back: {error.message}")


def _start(contributor: JoinedHub, store: ArtifactStore, settings: Settings, *, quiet: bool) -> str:
    from barnraise.hub.client.credentials import SITE_VARIABLE, credentials_text

    packed = pack(contributor.folder, store, folder_limits(settings))
    credentials = msgspec.structs.replace(contributor.credentials, folder="")
    contributing = [
        (name, value) for name, value in os.environ.items() if name.startswith(CONTRIBUTING_VARIABLES)
    ]
    question = StartRunRequest(
        program=RunProgram(
            command=contributor.command,
            folder=packed.id,
            needs=needs_in(python_sources(store, packed.manifest), contributor.command),
        ),
        options=RunOptions(
            title=contributor.credentials.run[:MAX_TITLE],
            quiet=quiet,
            environment="agent",  # as for a single member: install nothing without consent
        ),
        variables=((SITE_VARIABLE, credentials_text(credentials)), *contributing),
    )
    started = ask(question, RunStarted, timeout_s=_START_S)
    say(f"this site is {', '.join(started.nodes)}; run {started.run}. Ctrl-C leaves with all of them")
    return started.run
