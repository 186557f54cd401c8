"""Help of the command line: commands by task, and suggestions for mistyped ones. Light to import."""

from __future__ import annotations

from collections.abc import Sequence

import click

from barnraise.core.names import similar_names

# Every command is in one group. A test compares this with the commands that exist.
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Start here", ("up", "pair", "join", "status", "doctor", "torch", "self-test")),
    (
        "Train",
        (
            "run",
            "queue",
            "eval",
            "adapt",
            "plan",
            "ps",
            "runs",
            "watch",
            "logs",
            "open",
            "report",
            "track",
            "attach",
            "stop",
            "resume",
            "export",
            "checkpoint",
            "clean",
        ),
    ),
    ("With friends", ("hub", "invite")),
    (
        "Machines",
        (
            "nodes",
            "rename",
            "pause",
            "resume-machine",
            "limit",
            "metrics",
            "notify",
            "unpair",
            "leave",
            "down",
            "service",
            "audit",
            "uninstall",
        ),
    ),
    (
        "Other",
        (
            "accept",
            "continue",
            "psk",
            "listen",
            "id",
            "identity",
            "settings",
            "completion",
            "help",
            "explain",
            "version",
        ),
    ),
)


class SectionedGroup(click.Group):
    """Group whose help lists its commands by task."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for _, names in SECTIONS for name in names)
        limit = max(20, formatter.width - 6 - width)
        for title, names in SECTIONS:
            rows = []
            for name in names:
                command = self.get_command(ctx, name)
                if command is not None and not command.hidden:
                    rows.append((name.ljust(width), command.get_short_help_str(limit)))
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            similar = similar_names(args[0], self.list_commands(ctx))
            if not similar:
                raise
            raise click.UsageError(f"{error.message} Did you mean {similar}?", ctx) from error


def misplaced_options(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """Return options of ours among the arguments of a script, which come after it."""
    own = {
        name for parameter in command.params if isinstance(parameter, click.Option) for name in parameter.opts
    }
    return [text for text in arguments if text.partition("=")[0] in own and text.startswith("--")]
