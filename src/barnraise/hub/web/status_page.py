"""The run's public status page: read-only HTML without scripts. Pure text from the hub's state.

Values that members chose (names, reported losses) are escaped, or are numbers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from html import escape

from barnraise.core.units import counted, format_duration
from barnraise.hub.aggregation.update_checks import member_names
from barnraise.hub.protocol.clock import JUMP_S
from barnraise.hub.protocol.invites import short_key
from barnraise.hub.server.health import HealthWarning
from barnraise.hub.server.hub import Hub
from barnraise.hub.server.membership import has_seat_below
from barnraise.hub.storage.log import CommittedRound, MemberRecord

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_WIDTH, _HEIGHT = 720, 160
_VERSIONS_SHOWN, _REFUSALS_SHOWN, _MEMBERS_SHOWN = 20, 50, 200
_MAP_WIDTH, _MAP_HEIGHT = 720, 340
_RADIUS_X, _RADIUS_Y = 250.0, 120.0  # from the hub to a member
_NAMED = 24  # more names would cover each other
_LONGEST_NAME = 40
_SMALLEST, _LARGEST = 1.5, 26.0
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}
body{color:#222;background:#fff}table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}
td,th{text-align:left;padding:.2rem .6rem .2rem 0;border-bottom:1px solid #eee}
td.n,th.n{text-align:right}h1{font-size:1.4rem}h2{font-size:1.05rem;margin-top:2rem}
.bad{color:#a00}svg{width:100%;height:auto}small{color:#666}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}td,th{border-color:#333}.bad{color:#f77}}
"""


def render(hub: Hub) -> str:
    """Return the status page as HTML."""
    name, now = escape(hub.founding.name), hub.clock()
    versions = hub.versions
    head = versions[-1].number if versions else None
    samples = sum(version.samples for version in versions)
    waits = hub.waits.text(hub.state, hub.members, hub.now())
    state = "finished" if hub.state.is_finished else waits
    active = {lease.node for lease in hub.state.lent.values()}
    begin = "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=15>"
    title = f"<meta name=viewport content='width=device-width'><title>{name}</title><style>{_STYLE}</style>"
    member_counts = f"{counted(len(hub.members), 'member')}, {len(active)} training now"
    summary = f"Version {'–' if head is None else head} · {counted(samples, 'sample')} · {member_counts}"
    parts = [
        begin + title,
        f"<h1>{name}</h1><p>{summary}<br><small>{escape(state)}</small></p>",
        *(_warning(warning) for warning in hub.health.current()),
        _chart(versions),
        _member_map(hub, active),
        _members(hub, active),
        _versions(versions[-_VERSIONS_SHOWN:], now),
        _refusals(hub, now),
        f"<p><small>Hub {escape(str(hub.id))}</small></p></html>",
    ]
    return "\n".join(parts)


def _warning(trouble: HealthWarning) -> str:
    return f"<p class=bad>{escape(trouble.message)}.<br><small>{escape(trouble.hint)}</small></p>"


def _chart(versions: Sequence[CommittedRound]) -> str:
    """Draw the losses that members reported, by version."""
    points = [(version.number, version.loss) for version in versions if version.loss is not None]
    if len(points) < 2:
        return ""
    step = max(1, len(points) // _WIDTH)
    points = points[::step]
    losses = [loss for _, loss in points]
    low, high = min(losses), max(losses)
    first, last = points[0][0], points[-1][0]

    def place(number: int, loss: float) -> str:
        across = (number - first) / max(1, last - first) * _WIDTH
        up = (loss - low) / (high - low or 1.0) * (_HEIGHT - 20)
        return f"{across:.1f},{_HEIGHT - 10 - up:.1f}"

    line = " ".join(place(*point) for point in points)
    return (
        f"<h2>Loss reported by members</h2><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img "
        f"aria-label='loss from {losses[0]:.4g} to {losses[-1]:.4g}'>"
        f"<polyline points='{line}' fill=none stroke='#3a7' stroke-width=2 /></svg>"
        f"<small>version {first} to {last}: {losses[0]:.4g} to {losses[-1]:.4g}</small>"
    )


def _member_map(hub: Hub, active: set[str]) -> str:
    members = [member for member in _largest(hub) if member.role != "mirror"]
    if len(members) < 2:
        return ""
    legend = "<small>Larger circle: more samples. Green: training now. Thick line: a region.</small>"
    return f"<h2>Members</h2>{draw_members(members, active)}{legend}"


def draw_members(members: Sequence[MemberRecord], active: Collection[str]) -> str:
    """Draw the hub and its members as SVG, in the given order from the top.

    The hub does not know where a member is. The area of its circle is its share of the samples.
    """
    total_samples = sum(member.samples for member in members)
    spacing = math.pi * _RADIUS_Y / max(1, len(members))  # half of the way to the next one
    lines, circles = [], []
    for place, member in enumerate(members):
        angle = 2 * math.pi * place / len(members) - math.pi / 2
        x = _MAP_WIDTH / 2 + _RADIUS_X * math.cos(angle)
        y = _MAP_HEIGHT / 2 + _RADIUS_Y * math.sin(angle)
        share = member.samples / total_samples if total_samples else 0.0
        radius = max(_SMALLEST, min(_LARGEST, spacing) * math.sqrt(share))
        is_region = member.role == "region"
        colour = "#c33" if member.quarantine else "#3a7" if member.node in active else "#999"
        name = escape(member.name[:_LONGEST_NAME], quote=True)
        lines.append(
            f"<line x1='{_MAP_WIDTH / 2:.0f}' y1='{_MAP_HEIGHT / 2:.0f}' x2='{x:.1f}' y2='{y:.1f}' "
            f"stroke='{colour}' stroke-width='{3 if is_region else 1}' stroke-opacity='.4' />"
        )
        circles.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius:.1f}' fill='{colour}'>"
            f"<title>{name}: {member.samples:,} samples</title></circle>"
        )
        if len(members) <= _NAMED:
            anchor = "start" if math.cos(angle) >= 0 else "end"
            beside = x + math.copysign(radius + 5, math.cos(angle))
            circles.append(
                f"<text x='{beside:.1f}' y='{y + 4:.1f}' text-anchor='{anchor}' font-size='12' "
                f"fill='currentColor'>{name}</text>"
            )
    hub = f"<circle cx='{_MAP_WIDTH / 2:.0f}' cy='{_MAP_HEIGHT / 2:.0f}' r='6' fill='currentColor' />"
    label = f"{len(members)} members around the hub"
    return (
        f"<svg viewBox='0 0 {_MAP_WIDTH} {_MAP_HEIGHT}' role='img' aria-label='{label}' xmlns='http://www.w3.org/2000/svg'>"
        f"{''.join(lines)}{hub}{''.join(circles)}</svg>"
    )


def _largest(hub: Hub) -> list[MemberRecord]:
    return sorted(hub.members.values(), key=lambda member: -member.samples)[:_MEMBERS_SHOWN]


def _members(hub: Hub, active: set[str]) -> str:
    rows = []
    shown = by_invite(_largest(hub))
    sizes = Counter(member.invite for member in hub.members.values())
    for member in shown:
        together = f" ({sizes[member.invite]} members)" if sizes[member.invite] > 1 else ""
        invite = f"{escape(short_key(member.invite))}{together}" if member.invite else ""
        doing = "training" if member.node in active else ""
        if member.quarantine:
            doing = f"<span class=bad>quarantine: {escape(member.quarantine)}</span>"
        elif has_seat_below(member):
            doing = "at a region"
        rows.append(
            f"<tr><td>{escape(member.name)} <small>{escape(member.node[:9])}</small><td>{member.role}"
            f"<td>{invite}<td class=n>{member.samples:,}<td class=n>{member.accepted:,}<td>{doing}"
        )
    head = "<tr><th>Member<th>Role<th>Invite<th class=n>Samples<th class=n>Updates<th>"
    return f"<h2>Contributors</h2><table>{head}{''.join(rows)}</table>"


def by_invite(members: Sequence[MemberRecord]) -> list[MemberRecord]:
    """Sort members so that those that came with one invite stand together, the most active invite first."""
    samples = Counter[str]()
    for member in members:
        samples[member.invite or member.node] += member.samples
    return sorted(
        members,
        key=lambda member: (
            -samples[member.invite or member.node],
            member.invite or member.node,
            -member.samples,
        ),
    )


def _versions(versions: Sequence[CommittedRound], now: float) -> str:
    rows = [
        f"<tr><td class=n>{version.number}<td>{_ago(version.time, now)}<td class=n>{version.members}"
        f"<td class=n>{version.samples:,}"
        f"<td class=n>{'–' if version.loss is None else f'{version.loss:.4g}'}<td>{escape(version.rule)}"
        for version in reversed(versions)
    ]
    head = "<tr><th class=n>Version<th>When<th class=n>Updates<th class=n>Samples<th class=n>Loss<th>Rule"
    return f"<h2>Versions</h2><table>{head}{''.join(rows)}</table>"


def _refusals(hub: Hub, now: float) -> str:
    if not hub.refusals:
        return ""
    names = member_names(hub.members)
    rows = [
        f"<tr><td>{_ago(refusal.time, now)}<td>{escape(names.get(refusal.node, refusal.node[:9]))}"
        f"<td class=bad>{escape(refusal.kind)}<td>{escape(refusal.reason)}"
        for refusal in reversed(hub.refusals[-_REFUSALS_SHOWN:])
    ]
    head = "<tr><th>When<th>Member<th>Kind<th>Reason"
    return f"<h2>Refused updates</h2><table>{head}{''.join(rows)}</table>"


def _ago(moment: float, now: float) -> str:
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))
    if moment > now + JUMP_S:  # this machine's clock was set back since
        return f"{shown} UTC"
    return f"<span title='{shown} UTC'>{format_duration(max(0.0, round(now - moment)))} ago</span>"
