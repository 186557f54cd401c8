"""Options of ``barnraise run``: one for each field of the run's options."""

from __future__ import annotations

import typing
from typing import Any, Literal

import click
import pytest

from barnraise.agent_client.run_options import RunOptions
from barnraise.cli.main import app
from barnraise.cli.runs.options import run_options, set_option, take_run_options
from barnraise.core.errors import ConfigError, RunError


def parsed(*words: str) -> tuple[RunOptions, dict[str, Any]]:
    """Return the options of a command line, and what is left beside them."""

    @click.command
    @run_options
    @set_option
    @click.option("--more", default="more")
    def command(**options: Any) -> tuple[RunOptions, dict[str, Any]]:
        return take_run_options(options), options

    result: tuple[RunOptions, dict[str, Any]] = command.main(list(words), standalone_mode=False)
    return result


def test_command_line_without_options_gives_the_default_options() -> None:
    assert parsed() == (RunOptions(), {"more": "more", "variables": ()})


def test_each_option_sets_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "here")
    words = "--per-node 2 --min-nodes 3 --wait 2min --env sync --engine gloo --trust-fabric"
    flags = "--restarts 4 --quiet --sandbox"
    more = "--nice 5 --memory 2kb --container image --name title --set A=1=2 --set INHERITED --set ABSENT"
    chosen, others = parsed(*words.split(), *flags.split(), *more.split())
    assert others["variables"] == (("A", "1=2"), ("INHERITED", "here"), ("ABSENT", ""))
    assert chosen == RunOptions(
        title="title",
        per_node=2,
        min_nodes=3,
        wait_s=120.0,
        restarts=4,
        environment="sync",
        engine="gloo",
        fabric="trusted",
        quiet=True,
        nice=5,
        memory_bytes=2000,
        container="image",
        sandbox=True,
    )
    defaults = RunOptions()
    unset = [
        name for name in RunOptions.__struct_fields__ if getattr(chosen, name) == getattr(defaults, name)
    ]
    assert not unset


def test_choices_are_those_of_the_fields() -> None:
    offered = {option.name: option.type for option in app.commands["run"].params}
    for name, kind in typing.get_type_hints(RunOptions).items():
        if typing.get_origin(kind) is Literal and name != "fabric":  # a flag has no choices
            choice = offered[name]
            assert isinstance(choice, click.Choice)
            assert tuple(choice.choices) == typing.get_args(kind)


@pytest.mark.parametrize("words", [["--per-node", "65"], ["--min-nodes", "0"], ["--name", "x" * 201]])
def test_value_outside_the_limits_of_its_field_is_rejected(words: list[str]) -> None:
    with pytest.raises(RunError, match="not possible"):
        parsed(*words)


def test_unreadable_values_are_rejected() -> None:
    with pytest.raises(ConfigError, match="is not a time"):
        parsed("--wait", "soon")
    with pytest.raises(ConfigError, match="is not a size"):
        parsed("--memory", "much")
    with pytest.raises(RunError, match="is not NAME=VALUE"):
        parsed("--set", "1=2")
