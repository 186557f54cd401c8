"""The run's public page: read only, one file, no script. Pure text from the hub's state.

Whatever members chose themselves (their names, what they said their loss was) is escaped or a number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from barnraise.core.units import counted, format_duration
from barnraise.hub.aggregation.update_checks import names_of
from barnraise.hub.protocol.clock import JUMP_S
from barnraise.hub.server.health import HealthWarning
from barnraise.hub.server.hub import Hub
from barnraise.hub.storage.log import CommittedRound, MemberRecord
from barnraise.hub.web.world import drawn

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_WIDTH, _HEIGHT = 720, 160
_VERSIONS_SHOWN, _REFUSALS_SHOWN, _MEMBERS_SHOWN = 20, 50, 200
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}
body{color:#222;background:#fff}table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}
td,th{text-align:left;padding:.2rem .6rem .2rem 0;border-bottom:1px solid #eee}
td.n,th.n{text-align:right}h1{font-size:1.4rem}h2{font-size:1.05rem;margin-top:2rem}
.bad{color:#a00}svg{width:100%;height:auto}small{color:#666}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}td,th{border-color:#333}.bad{color:#f77}}
"""


def render(hub: Hub) -> str:
    name, now = escape(hub.founding.name), hub.clock()
    versions = hub.versions
    head = versions[-1].number if versions else None
    samples = sum(one.samples for one in versions)
    waits = hub.waits.said(hub.state, hub.members, hub.now())
    state = "finished" if hub.state.is_finished else waits
    active = {one.node for one in hub.state.lent.values()}
    begin = "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=15>"
    title = f"<meta name=viewport content='width=device-width'><title>{name}</title><style>{_STYLE}</style>"
    who = f"{counted(len(hub.members), 'member')}, {len(active)} training now"
    said = f"Version {'–' if head is None else head} · {counted(samples, 'sample')} · {who}"
    parts = [
        begin + title,
        f"<h1>{name}</h1><p>{said}<br><small>{escape(state)}</small></p>",
        *(_trouble(one) for one in hub.troubles.shown()),
        _chart(versions),
        _world(hub, active),
        _members(hub, active),
        _versions(versions[-_VERSIONS_SHOWN:], now),
        _refusals(hub, now),
        f"<p><small>Hub {escape(str(hub.id))}</small></p></html>",
    ]
    return "\n".join(parts)


def _trouble(trouble: HealthWarning) -> str:
    return f"<p class=bad>{escape(trouble.words)}.<br><small>{escape(trouble.hint)}</small></p>"


def _chart(versions: Sequence[CommittedRound]) -> str:
    """The loss that members said, by version."""
    points = [(one.number, one.loss) for one in versions if one.loss is not None]
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
        f"<h2>Loss, as members said it</h2><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img "
        f"aria-label='loss from {losses[0]:.4g} to {losses[-1]:.4g}'>"
        f"<polyline points='{line}' fill=none stroke='#3a7' stroke-width=2 /></svg>"
        f"<small>version {first} to {last}: {losses[0]:.4g} to {losses[-1]:.4g}</small>"
    )


def _world(hub: Hub, active: set[str]) -> str:
    members = [one for one in _largest(hub) if one.role != "mirror"]
    if len(members) < 2:
        return ""
    said = "<small>The larger, the more samples; green trains now; a thick line leads to a region.</small>"
    return f"<h2>Who trains it</h2>{drawn(members, active)}{said}"


def _largest(hub: Hub) -> list[MemberRecord]:
    return sorted(hub.members.values(), key=lambda one: -one.samples)[:_MEMBERS_SHOWN]


def _members(hub: Hub, active: set[str]) -> str:
    rows = []
    for one in _largest(hub):
        doing = "training" if one.node in active else ""
        if one.quarantine:
            doing = f"<span class=bad>quarantine: {escape(one.quarantine)}</span>"
        rows.append(
            f"<tr><td>{escape(one.name)} <small>{escape(one.node[:9])}</small><td>{one.role}"
            f"<td class=n>{one.samples:,}<td class=n>{one.accepted:,}<td>{doing}"
        )
    head = "<tr><th>Member<th>Role<th class=n>Samples<th class=n>Updates<th>"
    return f"<h2>Contributors</h2><table>{head}{''.join(rows)}</table>"


def _versions(versions: Sequence[CommittedRound], now: float) -> str:
    rows = [
        f"<tr><td class=n>{one.number}<td>{_ago(one.time, now)}<td class=n>{one.members}"
        f"<td class=n>{one.samples:,}"
        f"<td class=n>{'–' if one.loss is None else f'{one.loss:.4g}'}<td>{escape(one.rule)}"
        for one in reversed(versions)
    ]
    head = "<tr><th class=n>Version<th>When<th class=n>Updates<th class=n>Samples<th class=n>Loss<th>Rule"
    return f"<h2>Versions</h2><table>{head}{''.join(rows)}</table>"


def _refusals(hub: Hub, now: float) -> str:
    if not hub.refusals:
        return ""
    names = names_of(hub.members)
    rows = [
        f"<tr><td>{_ago(one.time, now)}<td>{escape(names.get(one.node, one.node[:9]))}"
        f"<td class=bad>{escape(one.kind)}<td>{escape(one.reason)}"
        for one in reversed(hub.refusals[-_REFUSALS_SHOWN:])
    ]
    head = "<tr><th>When<th>Member<th>Kind<th>Reason"
    return f"<h2>What was refused, and why</h2><table>{head}{''.join(rows)}</table>"


def _ago(moment: float, now: float) -> str:
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))
    if moment > now + JUMP_S:  # this machine's clock was set back since
        return f"{shown} UTC"
    return f"<span title='{shown} UTC'>{format_duration(max(0.0, round(now - moment)))} ago</span>"
