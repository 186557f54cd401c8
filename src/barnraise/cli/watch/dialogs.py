"""Windows over the screen: a question, a choice of a machine, help, and the output of a machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Label, OptionList, RichLog
from textual.widgets.option_list import Option

from barnraise.cli.watch.actions import MachineLog
from barnraise.core.errors import BarnraiseError
from barnraise.core.sanitize import printable

_MOST_LINES = 5000
_AGAIN_S = 1.0
HELP = """q       leave this screen; the run goes on
s       stop the run; it asks first
p       pause a machine, or let runs use it again
l       read the output of a machine
up, down, page up, page down, home, end    scroll
?       this help
Escape  close a window

In the list of events, ! is a warning and X an error.
Nothing on this screen changes the run, except s and p."""


class QuestionScreen(ModalScreen[bool]):
    """Question that only ``y`` answers with yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "Yes"),
        ("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Label(printable(self._question), markup=False)
            yield Label("y: yes    n: no", markup=False)


class MachineScreen(ModalScreen[str | None]):
    """Choice of a machine. ``rows``: name and what Enter does with it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss(None)", "Close")]

    def __init__(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._rows = title, rows

    def compose(self) -> ComposeResult:
        width = max(len(name) for name, _ in self._rows)
        options = [
            Option(Text(printable(f"{name:<{width}}  {words}")), id=f"m{place}")
            for place, (name, words) in enumerate(self._rows)
        ]
        with Vertical(classes="window"):
            yield Label(self._title, markup=False)
            yield OptionList(*options)
            yield Label("Enter: choose    Escape: close", markup=False)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._rows[event.option_index][0])


class HelpScreen(ModalScreen[None]):
    """Keys of the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark", "dismiss(None)", "Close")]

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Label(HELP, markup=False)


class LogScreen(ModalScreen[None]):
    """Output of the workers of one machine; follows it until the window is closed."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss(None)", "Close")]

    def __init__(self, machine: str, log: MachineLog) -> None:
        super().__init__()
        self._machine, self._source = machine, log
        self._left = threading.Event()

    def compose(self) -> ComposeResult:
        with Vertical(classes="whole"):
            yield Label(printable(f"Output of {self._machine}    Escape: close"), markup=False, id="title")
            yield RichLog(max_lines=_MOST_LINES, wrap=True, markup=False, highlight=False)

    def on_mount(self) -> None:
        self._follow()

    def on_unmount(self) -> None:
        self._left.set()

    @work(thread=True)
    def _follow(self) -> None:
        shown_error = ""
        while not self._left.is_set():
            try:
                lines, error = self._source.read(), ""
            except BarnraiseError as caught:
                lines, error = [], f"the agent does not answer: {caught.message}"
            if error and error != shown_error:
                lines = [error]
            shown_error = error
            if lines and not self._left.is_set():
                self.app.call_from_thread(self._show, lines)
            self._left.wait(_AGAIN_S if error or not lines else 0.1)

    def _show(self, lines: Sequence[str]) -> None:
        if self.is_mounted and not self._left.is_set():
            self.query_one(RichLog).write(Text("\n").join(map(Text.from_ansi, lines)))
