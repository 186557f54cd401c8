"""Notice of one event of a run: what every target gets, in words and as data. Pure.

Texts may come from scripts and other machines: they become printable, short, and lose logins of URLs. A
notice never has the output of a script.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from barnraise.agent_client.notifications.targets import EventName
from barnraise.agent_client.run_requests import TrainingProgress
from barnraise.core.sanitize import printable
from barnraise.core.units import counted

MAX_NAME, MAX_REASON = 64, 300
MOST_NAMES = 16
_LOGIN = re.compile(r"(?<=://)[^/\s]*@")  # up to the last @: a password may hold one
_COMMANDS = re.compile(r"[@<]|\](?=\()")  # @here, <!channel>, [a link](...)
_MOST_READ = 32768  # characters of a sentence of a record

NoticeState = Literal["done", "failed", "stalled", "running", "unknown", "test"]
Word = Annotated[str, Meta(max_length=MAX_NAME)]


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a run, as it was when it was noticed. ``key`` tells the events of a run apart.

    ``at``: seconds since 1970 on the sender's clock. ``sender``: the machine that sends it. ``lost_machine``:
    the one that is gone. ``machines``: those that train, or trained last. ``step``: None if unknown.
    """

    event: EventName | Literal["test"]
    key: Annotated[str, Meta(max_length=200)]
    run: Annotated[str, Meta(max_length=48)]
    state: NoticeState
    reason: Annotated[str, Meta(max_length=MAX_REASON)]
    at: float
    sender: Word
    lost_machine: Word = ""
    machines: Annotated[tuple[Word, ...], Meta(max_length=MOST_NAMES)] = ()
    step: int | None = None
    total_steps: int | None = None
    counts: Literal["step", "item"] = "step"
    metric: Word = ""
    value: float | None = None

    @property
    def id(self) -> str:
        """Return the id by which a target recognizes a notice that it gets twice."""
        text = f"{self.run}\0{self.key}\0{self.sender}"
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    @property
    def title(self) -> str:
        """Return the event in a few words."""
        match self.event:
            case "done":
                return f"{self.run} is done"
            case "failed":
                return f"{self.run} failed"
            case "stalled":
                return f"{self.run} is stalled"
            case "no-news":
                return f"no news of {self.run}"
            case "machine-gone":
                return f"{self.lost_machine} is gone from {self.run}"
            case _:
                return "a test of barnraise notify"

    @property
    def header_title(self) -> str:
        """Return the title for a header of a mail or of HTTP.

        A name of a machine could hold an encoded word (RFC 2047), in which readers find line ends and other
        headers.
        """
        return f"Barnraise: {self.title}".replace("=?", "= ?")

    @property
    def text(self) -> str:
        """Return what happened, and how far the run is, in one line."""
        parts = [self.reason]
        if self.step is not None:
            total = f" of {self.total_steps:,}" if self.total_steps is not None else ""
            parts.append(f"{self.counts} {self.step:,}{total}" if total else counted(self.step, self.counts))
        if self.metric and self.value is not None:
            parts.append(f"{self.metric} {self.value:.4g}")
        if self.machines:
            parts.append(f"on {', '.join(self.machines)}")
        return "; ".join(part for part in parts if part)

    def to_json(self) -> dict[str, object]:
        """Return the notice as a webhook gets it. ``text`` and ``content``: for services that show a line.

        In this line, a name is no mention of people and no link, which such services would make of it.
        """
        line = _COMMANDS.sub("\\g<0>\u200b", f"{self.title}: {self.text}")
        return {
            "id": self.id,
            "event": self.event,
            "run": self.run,
            "state": self.state,
            "title": self.title,
            "text": line,
            "content": line,
            "reason": self.reason,
            "lost_machine": self.lost_machine,
            "machines": list(self.machines),
            "step": self.step,
            "total_steps": self.total_steps,
            "metric": self.metric,
            "value": self.value,
            "at": self.at,
            "sender": self.sender,
        }


def clean(text: str, limit: int = MAX_REASON) -> str:
    """Return a text of a script or of another machine as a notice may quote it: one short line."""
    words = " ".join(text[:_MOST_READ].split())
    return printable(_LOGIN.sub("…@", words), limit=limit)


def with_progress(notice: Notice, progress: TrainingProgress | None) -> Notice:
    """Return the notice with the step and the newest logged value, where they are known."""
    if progress is None:
        return notice
    value = progress.value if progress.metric and math.isfinite(progress.value) else None
    return msgspec.structs.replace(
        notice,
        step=progress.step,
        total_steps=progress.total,
        counts=progress.counts,
        metric=clean(progress.metric, MAX_NAME),
        value=value,
    )
