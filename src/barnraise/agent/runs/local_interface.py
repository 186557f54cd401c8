"""Local interface of one run: a directory with a socket that serves the workers of this run only.

For workers it replaces the state directory. It has no keys, and its socket knows no other run. Its path is
short, because the path of a local socket may have about 100 bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from barnraise.core.files import remove_tree
from barnraise.transport.ipc.dial_broker import DialBroker

_PARENT = "ipc"
_NAME_BYTES = 3


class RunListener(Protocol):
    """The part of a listener that serves runs."""

    def open_run(self, run: str, directory: Path, *, has_secret: bool = True) -> None:
        """Serve the workers of a run at a local socket in ``directory``."""

    def close_run(self, run: str) -> None:
        """Close the local socket of a run."""


class RunInterface:
    """Local interface of one run between `open` and `close`."""

    def __init__(self, listener: RunListener, run: str, directory: Path, broker: DialBroker | None) -> None:
        self.directory = directory
        self._listener = listener
        self._run = run
        self._broker = broker

    @classmethod
    def open(
        cls,
        listener: RunListener,
        run: str,
        state: Path,
        make_broker: Callable[[Path], DialBroker] | None = None,
    ) -> RunInterface:
        """Create the directory and the socket of a run; raise ListenerError or OSError if that fails.

        ``make_broker``: workers get no discovery secret, because this broker dials for them.
        """
        parent = state / _PARENT
        parent.mkdir(mode=0o700, exist_ok=True)
        while True:
            directory = parent / secrets.token_hex(_NAME_BYTES)
            try:
                directory.mkdir(mode=0o700)
                break
            except FileExistsError:
                continue
        listener.open_run(run, directory, has_secret=make_broker is None)
        broker = make_broker(directory) if make_broker is not None else None
        if broker is not None:
            broker.start()
        return cls(listener, run, directory, broker)

    def close(self) -> None:
        """Close the socket of the run and remove its directory."""
        if self._broker is not None:
            self._broker.close()
        self._listener.close_run(self._run)
        remove_tree(self.directory)


def remove_interfaces(state: Path) -> None:
    """Remove the directories of an earlier agent that was killed."""
    remove_tree(state / _PARENT)
