"""Example of a run whose names and values are hostile: markup, control characters, NaN, too many events."""

from __future__ import annotations

import math
from html.parser import HTMLParser

from barnraise.history.columns import pack_column
from barnraise.history.entries import (
    CheckpointSaved,
    Entry,
    FailureNote,
    GroupStart,
    LinkSample,
    MachineFacts,
    MachineSample,
    MembershipChange,
    NoteEntry,
    PlanAdopted,
    RunEnd,
    RunStart,
    StepBatch,
    TrainingGoal,
    ValueBatch,
)

ATTACK = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"
EVENTS = 1000
STEPS = 400
_NODES = tuple(bytes([number]) * 32 for number in range(1, 40))


def hostile_run() -> list[Entry]:
    """Return the entries of such a run: every text that a script or a machine chooses is an attack."""
    long = (ATTACK * 40)[:190]
    values = [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 0.0, 1e-38, 2.0] * (STEPS // 8)
    start = 1_790_000_000.0
    return [
        *(
            MachineFacts(node, f"{ATTACK[:50]}{number}", long, 1e18, long)
            for number, node in enumerate(_NODES)
        ),
        RunStart(start, ATTACK * 20, ATTACK, ATTACK[:60], ((ATTACK, ATTACK),) * 3, ((ATTACK, ATTACK),)),
        TrainingGoal(start, None, 7, metric="<b>loss"),
        GroupStart(start, 1, 0, _NODES, "start"),
        StepBatch(1, 0, start, (0,) * STEPS, (7,) * STEPS, ((1 << 45,) * STEPS,) * 6),
        ValueBatch(1, 0, ("<b>loss", "nothing"), (pack_column(values), pack_column([math.nan] * STEPS))),
        *(
            MembershipChange(start + n, _NODES[n % 39], ("died", "joined")[n % 2], ATTACK, n % STEPS, n)
            for n in range(EVENTS)
        ),
        PlanAdopted(start, 3, ATTACK, ATTACK, ATTACK, 1e12, (1e12,) * 6, ((_NODES[0], 1e18),)),
        CheckpointSaved(start, 5, _NODES[0], 1e18),
        MachineSample(start, _NODES[0], 1e18, -100.0, 1e18, 1e18, 1e18, 1.0, 1.0),
        LinkSample(start, tuple((a, b, 1e18, 1e18) for a in _NODES[:20] for b in _NODES[:20])),
        FailureNote(start, _NODES[0], ATTACK, tail=ATTACK * 20),
        NoteEntry(start, ATTACK, is_warning=True),
        RunEnd(start + 1e9, 1, ATTACK),
    ]


def html_tags(text: str) -> list[tuple[str, list[str]]]:
    """Return the tags of an HTML text as a browser sees them, each with the names of its attributes."""
    parser = _TagParser()
    parser.feed(text)
    parser.close()
    return parser.tags


class _TagParser(HTMLParser):
    """Parser that keeps the tags and the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, [name for name, _ in attrs]))
