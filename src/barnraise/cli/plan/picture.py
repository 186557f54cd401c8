"""The predicted time of a step for each plan, as an SVG of bars: where the seconds go. Pure; written by hand.

Each plan has its name, its bar and its figures on lines of their own, so that no text meets another. Colours
follow the reader's light or dark mode.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from barnraise.cli.plan.text import PlanReport, loss, shown_plans, why
from barnraise.core.sanitize import printable
from barnraise.core.units import format_duration
from barnraise.planning import Plan

_SVG = "http://www.w3.org/2000/svg"
_WIDTH = 960
_MARGIN = 24
_TOTAL = 120  # to the right of the bars, for the whole step
_TOP = 96
_ROW = 66
_BAR = 18
_NAME_SIGNS = 118  # that fit into a line at 13 pixels
_HEAD_SIGNS = 100
# A plan that takes longer than this many times the chosen one fills its line, or others could not be seen.
_LONGEST = 2.5
_PHASES = (
    ("computing", "compute_s"),
    ("communication", "communication_s"),
    ("waiting", "waiting_s"),
    ("overhead", "overhead_s"),
)
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; font-size: 13px; fill: #1f2328; }
.head { font-size: 17px; font-weight: 600; }
.chosen { font-weight: 600; }
.small { font-size: 11.5px; fill: #59636e; }
.paper { fill: #ffffff; }
.rail { fill: #eceff2; }
.computing { fill: #0072b2; }
.communication { fill: #e69f00; }
.waiting { fill: #9aa0a6; }
.overhead { fill: #cc79a7; }
.cut { fill: none; stroke: #ffffff; stroke-width: 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .paper { fill: #0d1117; }
  .rail { fill: #21262d; }
  .computing { fill: #56b4e9; }
  .cut { stroke: #0d1117; }
}
"""


def picture(answer: PlanReport) -> str:
    """Draw one bar for each plan of the table."""
    shown = shown_plans(answer)
    plans = [*shown.allowed, *shown.others]
    height = _TOP + _ROW * len(plans) + _MARGIN // 2
    longest = min(max(plan.step_s for plan in plans), _LONGEST * answer.ranking.chosen.step_s)
    scale = (_WIDTH - 2 * _MARGIN - _TOTAL) / longest
    parts = [
        f'<svg xmlns="{_SVG}" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">',
        "<title>Predicted time of a step for each plan</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        _text(_MARGIN, 36, _heading(answer), "head"),
        *_legend(),
    ]
    for row, plan in enumerate(plans):
        parts += _row(answer, plan, _TOP + _ROW * row, scale)
    return "\n".join([*parts, "</svg>", ""])


def _heading(answer: PlanReport) -> str:
    seconds = format_duration(answer.ranking.chosen.step_s)
    return _short(f"A step of {answer.profile.batch:,} samples: {seconds} as planned", _HEAD_SIGNS)


def _legend() -> list[str]:
    parts = []
    for place, (name, _) in enumerate(_PHASES):
        x = _MARGIN + 150 * place
        parts.append(f'<rect class="{name}" x="{x}" y="54" width="14" height="14" rx="2"/>')
        parts.append(_text(x + 21, 66, name))
    return [*parts, _text(_MARGIN + 150 * len(_PHASES), 66, "//  longer: only its parts compare", "small")]


def _row(answer: PlanReport, plan: Plan, top: int, scale: float) -> list[str]:
    is_chosen = plan == answer.ranking.chosen
    reason = f"{why(answer, plan)}, " if not is_chosen else ""
    figures = ", ".join(f"{name} {format_duration(getattr(plan.phases, field))}" for name, field in _PHASES)
    name = f"{plan.name} (chosen)" if is_chosen else plan.name
    max_width = _WIDTH - 2 * _MARGIN - _TOTAL
    parts = [
        "<g>",
        f"<title>{_clean(plan.reason)}</title>",
        _text(_MARGIN, top + 12, _short(name, _NAME_SIGNS), "chosen" if is_chosen else ""),
        f'<rect class="rail" x="{_MARGIN}" y="{top + 19}" width="{max_width}" height="{_BAR}" rx="2"/>',
    ]
    begin = 0.0
    is_cut = plan.step_s * scale > max_width * 1.001
    own = max_width / plan.step_s if is_cut else scale
    for phase, field in _PHASES:
        end = min(float(max_width), begin + getattr(plan.phases, field) * own)
        if end - begin >= 0.05:
            parts.append(
                f'<rect class="{phase}" x="{_MARGIN + begin:.1f}" y="{top + 19}" '
                f'width="{end - begin:.1f}" height="{_BAR}"/>'
            )
        begin = end
    if is_cut:
        x = _MARGIN + max_width - 22
        parts.append(f'<path class="cut" d="M{x} {top + 39} l6 -22 M{x + 8} {top + 39} l6 -22"/>')
    x = _MARGIN + max_width + 10
    parts.append(_text(x, top + 33, format_duration(plan.step_s), "chosen" if is_chosen else ""))
    cost = loss(plan) if plan.is_exact else f"loss {loss(plan)}"
    small = f"{plan.speedup:.2f} times the best machine alone, {cost}, {reason}{figures}"
    parts.append(_text(_MARGIN, top + 52, small, "small"))
    return [*parts, "</g>"]


def _text(x: int, y: int, words: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}"{kind}>{_clean(words)}</text>'


def _short(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _clean(text: str) -> str:
    """Remove markup and characters that XML does not allow from a name of another machine."""
    return escape(printable(text))
