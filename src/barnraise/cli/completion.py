"""Names of machines, runs and pages for the Tab key. Light to import, quick, and silent without an agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

from barnraise.core.errors import BarnraiseError

if TYPE_CHECKING:
    from barnraise.agent_client.cluster_requests import AgentRequest, AgentResponse
    from barnraise.agent_client.run_requests import RunRequest, RunRow

T = TypeVar("T", bound="AgentResponse")
# A person waits for the answer, and can type the name instead.
DEADLINE_S = 0.5


def complete_machines(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the machines of the cluster. In a list such as ``mac,p``, complete its last name."""
    from barnraise.agent_client.cluster_requests import StatusRequest, StatusResponse

    status = _ask_quickly(StatusRequest(), StatusResponse)
    before, comma, typed = incomplete.rpartition(",")
    rows = status.nodes if status is not None else ()
    return _matching(((before + comma, row.name, row.state) for row in rows), typed)


def complete_runs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return all runs, the newest first."""
    return _runs(incomplete, lambda row: True)


def complete_active_runs(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the runs that have not ended, the newest first."""
    return _runs(incomplete, lambda row: row.phase != "ended")


def complete_ended_runs(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the runs that have ended, the newest first."""
    return _runs(incomplete, lambda row: row.phase == "ended")


def complete_files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of files."""
    return [CompletionItem(incomplete, type="file")]


def complete_pages(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the codes of errors and the checks of doctor."""
    from barnraise.cli.explain import read_pages

    try:
        names = dict.fromkeys(name for _, name in read_pages())
    except BarnraiseError:
        return []
    return _matching((("", name, "") for name in names), incomplete)


def complete_commands(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the commands beside the one that is typed."""
    parent = ctx.parent
    group = parent.command if parent is not None else None
    if parent is None or not isinstance(group, click.Group):
        return []
    return _matching((("", name, "") for name in group.list_commands(parent)), incomplete)


def _runs(incomplete: str, is_wanted: Callable[[RunRow], bool]) -> list[CompletionItem]:
    from barnraise.agent_client.run_requests import RunsRequest, RunsResponse

    listed = _ask_quickly(RunsRequest(), RunsResponse)
    rows = sorted(listed.runs, key=lambda row: -row.at) if listed is not None else []
    return _matching((("", row.run, row.phase) for row in rows if is_wanted(row)), incomplete)


def _matching(names: Iterable[tuple[str, str, str]], typed: str) -> list[CompletionItem]:
    """Return the names that start with the text. Each comes with the text before it and a remark."""
    return [
        CompletionItem(before + name, help=remark or None)
        for before, name, remark in names
        if name.lower().startswith(typed.lower())
    ]


def _ask_quickly(question: AgentRequest | RunRequest, expected: type[T]) -> T | None:
    """Return the agent's response; None if there is no agent, or none in time. Nothing is printed."""
    from barnraise.agent_client.client import ListenerClient
    from barnraise.agent_client.cluster_requests import decode_response, encode
    from barnraise.core.config import load_settings, state_path

    deadline = time.monotonic() + DEADLINE_S
    try:
        with ListenerClient.connect(state_path(load_settings()), timeout=DEADLINE_S) as client:
            answer = decode_response(client.ask(encode(question), max(0.01, deadline - time.monotonic())))
    except (BarnraiseError, OSError):  # a shell that completes must not show an error
        return None
    return answer if isinstance(answer, expected) else None
