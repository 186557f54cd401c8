"""The command line is a frozen list: every verb and option is a promise to somebody's script."""

from __future__ import annotations

from collections.abc import Iterator

import click

from backyard.cli.main import app

_JSON = {"--json"}
FROZEN = {
    "continue": {"--without", *_JSON},
    "doctor": _JSON,
    "down": _JSON,
    "id": set(),
    "join": {"code", "--at", "--guest", *_JSON},
    "leave": {"--yes", *_JSON},
    "listen": {"--port", "--trust", "--until-idle"},
    "nodes": _JSON,
    "pair": {"--guest", "--wait", "--no-wait", *_JSON},
    "psk new": {"--guest", "--output", *_JSON},
    "rename": {"name", *_JSON},
    "service install": _JSON,
    "service remove": _JSON,
    "service status": _JSON,
    "settings": set(),
    "status": {"--graph", "--measure", *_JSON},
    "torch": set(),
    "unpair": {"node", "--yes", *_JSON},
    "up": {"--detach", "--psk-file", "--witness"},
}
GLOBAL_OPTIONS = {"--version"}


def _commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _options(command: click.Command) -> set[str]:
    return {option for found in command.params for option in (*found.opts, *found.secondary_opts)}


def test_verbs_and_options_are_frozen() -> None:
    assert {name: _options(command) for name, command in _commands(app)} == FROZEN


def test_global_options_are_frozen() -> None:
    assert _options(app) == GLOBAL_OPTIONS


def test_every_verb_says_what_it_does() -> None:
    for name, command in _commands(app):
        assert command.help, name
