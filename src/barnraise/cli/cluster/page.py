"""``barnraise open``: a one-time link to the page of a machine, opened in a browser if there is one."""

from __future__ import annotations

import os
import sys
import webbrowser

import click

from barnraise.agent_client.cluster_requests import OpenPageRequest, OpenPageResponse
from barnraise.cli.agent_call import ask, ensure_agent, print_json


def open_page(*, on: str, only_print: bool, as_json: bool) -> int:
    """Print the link, and open it in a browser unless ``only_print``."""
    ensure_agent()
    response = ask(OpenPageRequest(on), OpenPageResponse)
    if as_json:
        print_json(response)
        return 0
    click.echo(f"The page of {response.machine}, for one use within two minutes:\n\n  {response.link}\n")
    if not only_print and has_display() and webbrowser.open(response.link):
        click.echo("It opens in your browser.")
    else:
        click.echo("Open the link in a browser on this machine.")
    return 0


def has_display() -> bool:
    """Tell whether a browser would have a screen; a text browser in this terminal is not meant."""
    if sys.platform != "linux":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
