"""A picture of who trains a run: the hub in the middle, a circle for each member. Pure text.

Nobody is asked where he is: the hub knows of a member what it brought, not its place. The circle's area is
its share of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from html import escape

from barnraise.hub.storage.log import MemberRecord

_WIDTH, _HEIGHT = 720, 340
_ACROSS, _UP = 250.0, 120.0  # from the hub to a member
_NAMED = 24  # more names would cover each other
_LONGEST_NAME = 40
_SMALLEST, _LARGEST = 1.5, 26.0


def drawn(members: Sequence[MemberRecord], active: Collection[str]) -> str:
    """An SVG; the members in the order in which they are given, from the top on."""
    whole = sum(one.samples for one in members)
    room = math.pi * _UP / max(1, len(members))  # half of the way to the next one
    lines, circles = [], []
    for place, one in enumerate(members):
        angle = 2 * math.pi * place / len(members) - math.pi / 2
        x = _WIDTH / 2 + _ACROSS * math.cos(angle)
        y = _HEIGHT / 2 + _UP * math.sin(angle)
        share = one.samples / whole if whole else 0.0
        radius = max(_SMALLEST, min(_LARGEST, room) * math.sqrt(share))
        is_region = one.role == "region"
        colour = "#c33" if one.quarantine else "#3a7" if one.node in active else "#999"
        name = escape(one.name[:_LONGEST_NAME], quote=True)
        lines.append(
            f"<line x1='{_WIDTH / 2:.0f}' y1='{_HEIGHT / 2:.0f}' x2='{x:.1f}' y2='{y:.1f}' "
            f"stroke='{colour}' stroke-width='{3 if is_region else 1}' stroke-opacity='.4' />"
        )
        circles.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius:.1f}' fill='{colour}'>"
            f"<title>{name}: {one.samples:,} samples</title></circle>"
        )
        if len(members) <= _NAMED:
            anchor = "start" if math.cos(angle) >= 0 else "end"
            beside = x + math.copysign(radius + 5, math.cos(angle))
            circles.append(
                f"<text x='{beside:.1f}' y='{y + 4:.1f}' text-anchor='{anchor}' font-size='12' "
                f"fill='currentColor'>{name}</text>"
            )
    hub = f"<circle cx='{_WIDTH / 2:.0f}' cy='{_HEIGHT / 2:.0f}' r='6' fill='currentColor' />"
    said = f"{len(members)} members around the hub"
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{said}' xmlns='http://www.w3.org/2000/svg'>"
        f"{''.join(lines)}{hub}{''.join(circles)}</svg>"
    )
