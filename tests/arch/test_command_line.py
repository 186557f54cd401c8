"""The command line is a frozen list: every verb and option is a promise to somebody's script."""

from __future__ import annotations

import inspect

from backyard.cli.main import app

FROZEN = {
    "id": {},
    "listen": {"--port": "port", "--trust": "trust", "--until-idle": "until_idle"},
    "settings": {},
    "torch": {},
}
GLOBAL_OPTIONS = {"--version"}


def _options(function: object) -> dict[str, str]:
    assert callable(function)
    found = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        (option,) = parameter.annotation.__metadata__
        found[(option.param_decls or (f"--{name.replace('_', '-')}",))[0]] = name
    return found


def test_verbs_and_options_are_frozen() -> None:
    assert {command.name: _options(command.callback) for command in app.registered_commands} == FROZEN


def test_global_options_are_frozen() -> None:
    assert app.registered_callback is not None
    assert set(_options(app.registered_callback.callback)) == GLOBAL_OPTIONS


def test_every_verb_says_what_it_does() -> None:
    for command in app.registered_commands:
        assert inspect.getdoc(command.callback), command.name
