"""Screen of ``barnraise watch``: draws what changed, and nothing else; the run does not notice it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer

from barnraise.cli.watch.actions import Actions
from barnraise.cli.watch.dialogs import HelpScreen, LogScreen, MachineScreen, QuestionScreen
from barnraise.cli.watch.lines import Line, Style
from barnraise.cli.watch.page import page_lines
from barnraise.cli.watch.snapshot import Freshness, Snapshot, SnapshotSource, newest_entry_at
from barnraise.core.errors import BarnraiseError

_LOOK_S = 1.0
_SHARE_OF_TIME = 0.05  # of one processor, for looks that cost much
_ENDED_LOOK_S = 10.0
_STYLES: dict[Style, RichStyle] = {
    "plain": RichStyle(),
    "title": RichStyle(bold=True, color="cyan"),
    "strong": RichStyle(bold=True),
    "faint": RichStyle(dim=True),
    "good": RichStyle(color="green"),
    "warning": RichStyle(color="yellow"),
    "error": RichStyle(color="red", bold=True),
    "curve": RichStyle(color="cyan", bold=True),
}


class PageView(ScrollView, can_focus=True):
    """Lines of the page. Only lines that changed are drawn again."""

    def __init__(self) -> None:
        super().__init__(id="page")
        self._lines: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        """Show these lines in place of the last ones."""
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.virtual_size = Size(self.size.width, len(lines))
            self.refresh()
            return
        top, width = self.scroll_offset.y, self.size.width
        changed = [row for row, (old, new) in enumerate(zip(before, lines, strict=True)) if old != new]
        regions = [Region(0, row - top, width, 1) for row in changed if 0 <= row - top < self.size.height]
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        row = y + self.scroll_offset.y
        width = self.size.width
        if row >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        segments = [Segment(span.text, _STYLES[span.style]) for span in self._lines[row]]
        return Strip(segments).adjust_cell_length(width).apply_style(self.rich_style)


class WatchApp(App[None]):
    """Screen of one run."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #page { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1;
        scrollbar-color: ansi_bright_black; scrollbar-background: ansi_default; }
    QuestionScreen, MachineScreen, HelpScreen { align: center middle; }
    .window { width: auto; max-width: 90%; height: auto; max-height: 90%; border: round; padding: 0 1; }
    .window Label { width: auto; max-width: 100%; }
    .window OptionList { height: auto; max-height: 12; width: 60; max-width: 100%; }
    .whole { width: 100%; height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "stop_run", "Stop run"),
        Binding("p", "pause_machine", "Pause machine"),
        Binding("l", "open_log", "Logs"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        source: SnapshotSource,
        actions: Actions,
        first: Snapshot,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ansi_color=True)
        self.snapshot = first
        self._source, self._actions, self._clock = source, actions, clock
        self._answered_at = clock()
        self._newest_at = newest_entry_at(first.view)
        self._news_at = clock() - max(0.0, first.view.at - self._newest_at)
        self._error = ""
        self._left = threading.Event()
        self._drawn_key: object = None
        self._pause_s = _LOOK_S
        self._asked: dict[str, bool] = {}  # pauses and their ends that the cluster does not show yet

    def compose(self) -> ComposeResult:
        yield PageView()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(PageView).focus()
        self.set_interval(_LOOK_S, self._draw)
        self._follow()

    def on_unmount(self) -> None:
        self._left.set()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    @work(thread=True)
    def _follow(self) -> None:
        """Look again and again, until the screen is closed."""
        while not self._left.wait(self._pause_s):
            begin = time.thread_time()
            try:
                snapshot, error = self._source.look(), ""
            except BarnraiseError as caught:
                snapshot, error = None, caught.message
            cost_s = time.thread_time() - begin
            self._pause_s = max(_LOOK_S, cost_s / _SHARE_OF_TIME)
            if snapshot is not None and snapshot.view.state != "running":
                self._pause_s = max(self._pause_s, _ENDED_LOOK_S)
            if not self._left.is_set():
                self.call_from_thread(self._note, snapshot, error)

    def _note(self, snapshot: Snapshot | None, error: str) -> None:
        self._error = error
        if snapshot is not None:
            self.snapshot, self._answered_at = snapshot, self._clock()
            self._asked = {
                name: paused
                for name, paused in self._asked.items()
                if paused != (name in snapshot.user_pauses)
            }
            newest = newest_entry_at(snapshot.view)
            if newest != self._newest_at:
                self._newest_at, self._news_at = newest, self._clock()
        self._draw()

    @property
    def freshness(self) -> Freshness:
        """Return how old is what the screen shows."""
        now = self._clock()
        return Freshness(now - self._answered_at, now - self._news_at, self._error)

    def _draw(self) -> None:
        if self._left.is_set() or not self.screen_stack:
            return
        page = self.screen_stack[0].query_one(PageView)
        stale = self.freshness.sentence(self.snapshot.view)
        key = (id(self.snapshot), stale, page.size.width)
        if key == self._drawn_key or not page.size.width:
            return
        self._drawn_key = key
        page.show(page_lines(self.snapshot, page.size.width - 1, stale=stale))

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_stop_run(self) -> None:
        view = self.snapshot.view
        if view.state != "running":
            self.notify("The run has ended already.")
            return

        def stop(yes: bool | None) -> None:
            if yes:
                self._act(self._actions.stop)

        self.push_screen(QuestionScreen(f"Stop the run {view.run} on every machine?"), stop)

    def action_pause_machine(self) -> None:
        rows = []
        for machine in self.snapshot.view.machines:
            paused = self._is_paused(machine.name)
            rows.append(
                (machine.name, "is paused: let runs use it" if paused else f"{machine.state}: pause it")
            )
        self._choose("Pause a machine, or let runs use it again", rows, self._toggle_pause)

    def _toggle_pause(self, machine: str) -> None:
        paused = not self._is_paused(machine)

        def act() -> str:
            sentence = self._actions.set_pause(machine, paused=paused)
            self.call_from_thread(self._remember, machine, paused)
            return sentence

        self._act(act)

    def _remember(self, machine: str, paused: bool) -> None:
        self._asked[machine] = paused

    def _is_paused(self, machine: str) -> bool:
        """Tell whether a user has paused a machine; what this screen asked for counts at once."""
        return self._asked.get(machine, machine in self.snapshot.user_pauses)

    def action_open_log(self) -> None:
        rows = [(machine.name, str(machine.state)) for machine in self.snapshot.view.machines]
        self._choose("Read the output of a machine", rows, self._open_log)

    def _open_log(self, machine: str) -> None:
        self.push_screen(LogScreen(machine, self._actions.log_of(machine)))

    def _choose(self, title: str, rows: list[tuple[str, str]], then: Callable[[str], None]) -> None:
        if not rows:
            self.notify("No machine of the run is known yet.")
        else:
            self.push_screen(
                MachineScreen(title, rows), lambda name: then(name) if name is not None else None
            )

    @work(thread=True)
    def _act(self, action: Callable[[], str]) -> None:
        """Make a request, and say what it did or why it failed."""
        try:
            sentence, severity = action(), "information"
        except BarnraiseError as error:
            sentence, severity = f"{error.message}. {error.hint}" if error.hint else error.message, "error"
        if not self._left.is_set():
            self.call_from_thread(self._say, sentence, severity)

    def _say(self, sentence: str, severity: str) -> None:
        words = f"Failed: {sentence}" if severity == "error" else sentence
        self.notify(words, severity="error" if severity == "error" else "information", markup=False)
