"""``barnraise.watch()``: the live display of a run in a notebook."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from barnraise.core.errors import BarnraiseError, RunError
from barnraise.display.notebook.picture import draw_picture, plain_text, waiting_picture
from barnraise.display.source import HistorySource
from barnraise.history.view import RunView

_LEAST_PAUSE_S = 1.0
_PART_OF_TIME = 0.1  # of one processor that the display may take
_SAVED_EVERY_S = 20.0
_WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"


def watch(run: str | None = None) -> RunDisplay:
    """Show a run in the output of this notebook cell, and return at once.

    ``run``: its name, or the beginning of it; without it, the run whose record changed last. The picture
    follows the run until it ends. It stays in the notebook when the notebook is saved.
    """
    require_notebook()
    source = HistorySource()
    name = source.find(run) if run is not None else source.newest()
    return RunDisplay(name)


class RunDisplay:
    """Live display of one run in the output of a cell. A thread refreshes it until the run ends.

    ``view``: what the display shows; None before the first entry.
    """

    def __init__(self, run: str) -> None:
        from IPython.display import display

        from barnraise.display.notebook.widget import PictureWidget

        self.run = run
        self.view: RunView | None = None
        self._problem = ""
        self._source: HistorySource | None = None
        self._stopped = threading.Event()
        self._refresh()
        self._widget: Any = PictureWidget(picture=self._picture())
        self._handle: Any = display(  # type: ignore[no-untyped-call]
            self._bundle(is_live=True), raw=True, display_id=True
        )
        self._thread = threading.Thread(target=self._follow, name=f"display of {run}", daemon=True)
        self._thread.start()

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended; return False if it goes on after ``timeout_s`` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop following the run; the last picture stays. The run goes on."""
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        saved_at = time.monotonic()
        pause_s = _LEAST_PAUSE_S
        while not self._has_ended() and not self._stopped.wait(pause_s):
            began = time.monotonic()
            self._refresh()
            self._widget.picture = self._picture()
            if time.monotonic() - saved_at > _SAVED_EVERY_S:
                self._handle.update(self._bundle(is_live=True), raw=True)
                saved_at = time.monotonic()
            pause_s = max(_LEAST_PAUSE_S, (time.monotonic() - began) / _PART_OF_TIME)
        if not self._has_ended():
            self._refresh()
        # Without the widget, the output is the same in a notebook that was saved, and without a kernel.
        self._handle.update(self._bundle(is_live=False), raw=True)
        self._widget.close()

    def _refresh(self) -> None:
        try:
            self._source = self._source or HistorySource()
            self.view = self._source.view(self.run)
            self._problem = ""
        except BarnraiseError as error:
            self._source = None  # the agent may have another address when it is back
            self._problem = error.message

    def _has_ended(self) -> bool:
        return self.view is not None and self.view.ended_at is not None

    def _picture(self) -> str:
        if self.view is None:
            return waiting_picture(self.run, self._problem or "waiting for the first entry")
        return draw_picture(self.view, self._problem)

    def _bundle(self, *, is_live: bool) -> dict[str, object]:
        """Return the output of the cell in all its forms; a viewer takes the best one that it knows."""
        text = plain_text(self.view) if self.view is not None else f"{self.run}: no entry yet"
        forms: dict[str, object] = {"text/plain": text, "text/html": self._picture()}
        if is_live:
            model = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
            forms[_WIDGET_TYPE] = model
        return forms


def require_notebook() -> None:
    """Raise RunError outside of a notebook, or without the packages of the extra."""
    try:
        import anywidget  # noqa: F401
        from IPython.core.getipython import get_ipython
    except ImportError as error:
        raise RunError(
            f"the display of notebooks needs {error.name}, which is not installed here",
            hint=f"Install it: {sys.executable} -m pip install anywidget ipython",
        ) from error
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        raise RunError(
            "barnraise.watch() shows a run in a notebook, and this is no notebook",
            hint="In a terminal: barnraise watch RUN",
        )
