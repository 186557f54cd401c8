"""``barnraise.toml`` beside the script: options of ``barnraise run`` that a project always needs.

The keys of its table ``[run]`` are the long options of the command. They are read from the command itself,
so there is no second list of them. The command line wins over the file.
"""

from __future__ import annotations

import os
import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from barnraise.cli.runs.options import is_path
from barnraise.core.errors import BarnraiseError, ConfigError
from barnraise.core.names import similar_names

T = TypeVar("T")
FILE_NAME = "barnraise.toml"
_TABLE = "run"
# What a person asks for once, so that a file never asks for it. Names of parameters.
_ONCE = frozenset({"dry_run", "as_json", "picture", "add"})


@dataclass(frozen=True)
class ProjectFile:
    """Options of a project file by the parameters of the command, as click takes them for defaults."""

    path: Path
    values: Mapping[str, object]


class ProjectFileCommand(click.Command):
    """Command whose options may stand in the project file.

    ``keys_of``: the command whose options are the keys of the file, if that is another command.
    """

    def __init__(self, *args: Any, keys_of: click.Command | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.keys_of = keys_of or self
        self.params.append(
            click.Option(
                ["--no-project-file"],
                is_flag=True,
                expose_value=False,
                help=f"Ignore the options in {FILE_NAME} (docs/runs.md).",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = self.make_parser(ctx).parse_args(args=list(args))[0]
        help_option = self.get_help_option(ctx)
        skipping = ("no_project_file", help_option.name if help_option is not None else "")
        is_ignored = ctx.resilient_parsing or any(typed.get(name) is True for name in skipping)
        place = _folder_of(typed.get("script"), typed.get("folder"))
        file = None if is_ignored else read_project_file(place / FILE_NAME, self.keys_of)
        if file is not None:
            own = {param.name for param in self.params}
            values = {name: value for name, value in file.values.items() if name in own}
            ctx.default_map = {**(ctx.default_map or {}), **values}
            ctx.meta[FILE_NAME] = file
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        file = ctx.meta.get(FILE_NAME)
        if file is not None and (text := _used(self, ctx)):
            line = f"barnraise: options from {os.path.relpath(file.path)}: {text}"
            click.echo("\n".join(textwrap.wrap(line, 79, subsequent_indent="  ")), err=True)
        return super().invoke(ctx)


class RunKeysCommand(ProjectFileCommand):
    """Command that starts runs, and whose project file has the options of ``barnraise run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        root = ctx.find_root().command
        run = root.get_command(ctx, "run") if isinstance(root, click.Group) else None
        self.keys_of = run or self
        return super().parse_args(ctx, args)


def read_project_file(path: Path, command: click.Command) -> ProjectFile | None:
    """Return the options in a project file; None if there is no file.

    Raise ConfigError with the file, the line and the key if an option is unknown or has a wrong value.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        document = tomllib.loads(text)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the project file {path} cannot be read: {error}",
            hint="Make it a UTF-8 text file that you may read, or add --no-project-file.",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the project file {path} is not valid TOML: {error}", hint="Correct the line named above."
        ) from error
    table = document.get(_TABLE, {})
    for name in document:
        if name != _TABLE or not isinstance(table, dict):
            raise ConfigError(
                f"{_place(path, text, name)}: {name!r} is not a table of this file",
                hint=f"Write the options below a line [{_TABLE}]: {', '.join(option_keys(command))}.",
            )
    return ProjectFile(path, dict(_value(path, text, command, key, value) for key, value in table.items()))


def option_keys(command: click.Command) -> dict[str, click.Option]:
    """Return the options that a project file may contain, by their keys."""
    return {
        name.removeprefix("--"): option
        for option in command.params
        if isinstance(option, click.Option) and option.name not in _ONCE and option.expose_value
        for name in option.opts
        if name.startswith("--")
    }


def _folder_of(script: object, folder: object) -> Path:
    """Return the folder of the project file: that of the script, or of a module the folder that is sent."""
    if isinstance(script, str) and script != "-m":
        return Path(script).parent
    return Path(folder) if isinstance(folder, str) else Path()


def _value(path: Path, text: str, command: click.Command, key: str, value: object) -> tuple[str, object]:
    keys = option_keys(command)
    place = _place(path, text, key)
    option = keys.get(key)
    if option is None:
        similar = similar_names(key, list(keys))
        guess = f"Did you mean {similar}? " if similar else ""
        raise ConfigError(
            f"{place}: {key!r} is not an option of `barnraise {command.name}`",
            hint=f"{guess}The keys are: {', '.join(keys)}.",
        )
    try:
        converted = _convert(option, value, path.parent)
        for item in converted if isinstance(converted, list) else [converted]:
            option.type(item, option)
    except click.BadParameter as error:
        raise ConfigError(f"{place}: {key} has a wrong value: {error.message}") from error
    except BarnraiseError as error:
        raise ConfigError(f"{place}: {key} has a wrong value: {error.message}", hint=error.hint) from error
    return option.name, converted


def _convert(option: click.Option, value: object, base: Path) -> object:
    """Return a value of the file in the form that click takes. Relative paths start at the file."""
    if option.is_flag:
        return _checked(value, bool, "true or false")
    if isinstance(option.type, click.types.IntParamType):
        return _checked(value, int, "a whole number")
    if not option.multiple:
        text = _checked(value, str, "text in quotes")
        return str(base / text) if isinstance(option.type, click.Path) else text
    metavar = option.metavar or ""
    if isinstance(value, dict) and "=" in metavar:
        value = [f"{name}={_checked(item, str, 'text in quotes')}" for name, item in value.items()]
    items = [value] if isinstance(value, str) else _checked(value, list, "a list of texts")
    texts = [_checked(item, str, "a list of texts") for item in items]
    if metavar.endswith("=PATH|ID"):
        return [_from_base(text, base) if is_path(text.partition("=")[2], base) else text for text in texts]
    return [_from_base(text, base) for text in texts] if metavar.endswith("=PATH") else texts


def _checked(value: object, kind: type[T], words: str) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise click.BadParameter(f"{value!r} is not {words}")
    return value


def _from_base(text: str, base: Path) -> str:
    """Return NAME=PATH with the path from the file's folder; NAME=@PATH is a path of each machine."""
    name, equals, path = text.partition("=")
    if not path or path.startswith("@"):
        return text
    return f"{name}{equals}{base / Path(path).expanduser()}"


def _place(path: Path, text: str, key: str) -> str:
    """Return the file and the line of a key or table, as "train/barnraise.toml, line 3"."""
    pattern = re.compile(rf"\s*(\[\s*)?[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
    numbers = [number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)]
    return f"{path}, line {numbers[0]}" if numbers else str(path)


def _used(command: click.Command, ctx: click.Context) -> str:
    """Return the options that the file decided, as "on = mac, pc; env = sync"."""
    assert ctx.default_map is not None
    return "; ".join(
        f"{key} = {_shown(ctx.default_map[option.name])}"
        for key, option in option_keys(command).items()
        if ctx.get_parameter_source(option.name) is ParameterSource.DEFAULT_MAP
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
