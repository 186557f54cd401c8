"""Command ``track`` with its options. Light to import."""

from __future__ import annotations

import click

from barnraise.cli.completion import complete_runs


@click.command("track")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option(
    "--to",
    "targets",
    metavar="TRACKER=PLACE",
    multiple=True,
    required=True,
    help="A tracker: tensorboard=FOLDER, wandb=FOLDER, trackio=FOLDER or mlflow=ADDRESS.",
)
def track_command(run: str | None, targets: tuple[str, ...]) -> int:
    """Give the steps of RUN (default: the newest) to trackers until it ends, each exactly once.

    You can stop the command and start it again: it goes on where it stopped.
    """
    from barnraise.core.sanitize import printable
    from barnraise.display.source import HistorySource
    from barnraise.history.logs.record_reader import EntryLists, RecordReader
    from barnraise.integrations.trackers.feeder import Logs, feed, open_tracker

    source = HistorySource()
    name = source.find(run) if run is not None else source.newest()
    trackers = [open_tracker(target, name) for target in targets]
    click.echo(f"the steps of run {printable(name)} go to {', '.join(targets)}; Ctrl-C stops this")
    reader = RecordReader(name, EntryLists())

    def read() -> Logs:
        nonlocal source
        source = HistorySource()  # a source of its own: the agent may have been restarted
        source.read(reader)
        return reader.history.logs

    try:
        feed(
            name,
            trackers,
            read,
            lambda text: click.echo(printable(text)),
            with_end=lambda view: source.with_end(view),
        )
    finally:
        for tracker in trackers:
            tracker.close()
    return 0
