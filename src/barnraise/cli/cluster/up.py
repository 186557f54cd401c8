"""``barnraise up``: this machine's agent, with a calm display, or in the background."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from barnraise.agent_client.bootstrap import AGENT_LOG, start_agent
from barnraise.agent_client.cluster_requests import StatusRequest, StatusResponse
from barnraise.cli.agent_call import ask, warn_of_root
from barnraise.cli.terminal import is_terminal
from barnraise.cli.waiting import waiting
from barnraise.core.config import load_settings, state_directory
from barnraise.core.errors import AgentError
from barnraise.core.flow.console_log import install_process_log


def run(*, detach: bool, psk_file: Path | None, witness: bool) -> int:
    """Run the agent until Ctrl-C or `barnraise down`. With ``detach``, return when the agent answers."""
    settings = load_settings()
    if settings.network.encryption == "plaintext":
        click.echo("barnraise: workers' links are PLAINTEXT, by your setting; agents are encrypted", err=True)
    warn_of_root()
    if detach:
        options = ["--psk-file", str(psk_file.resolve())] if psk_file is not None else []
        options += ["--witness"] if witness else []
        with waiting("Starting the agent"):
            pid = start_agent(settings, options)
        if pid is None:
            raise AgentError("an agent runs on this machine already", hint="See it with `barnraise status`.")
        log = state_directory(settings) / AGENT_LOG
        click.echo(f"The agent runs in the background (pid {pid}); its log is {log}.")
        click.echo(_next())
        return 0
    from barnraise.agent.__main__ import serve
    from barnraise.cli.cluster.display import Display, print_events

    install_process_log(logging.WARNING, "%(levelname)s %(message)s")
    logging.getLogger("zeroconf").setLevel(logging.ERROR)
    show = Display().attach if is_terminal(sys.stdout) else print_events
    return serve(settings, psk_file=psk_file, witness=witness, on_start=show)


def _next() -> str:
    """Return the next step for the user; a machine that was paired before finds its cluster by itself."""
    machines = len(ask(StatusRequest(), StatusResponse, offer_start=False).nodes)
    if machines > 1:
        return (
            f"It is one of {machines} paired machines and finds the others automatically: `barnraise status`."
        )
    return "Next: `barnraise pair` here, then `barnraise join CODE` on another machine."
