"""Style sheet of the charts, for light, dark and paper."""

from __future__ import annotations

_LIGHT = """
--br-page: #ffffff; --br-ink: #1c2733; --br-quiet: #5b6876; --br-line: #d5dbe1; --br-soft: #f2f5f8;
--br-main: #0b63ce; --br-raw: #8fb8ea; --br-band: #dce9f9; --br-good: #1a7f4b; --br-warn: #9a5b00;
--br-bad: #b3261e; --br-off: #c9d1d9; --br-a: #0b63ce; --br-b: #b8690f; --br-c: #7a4fc4; --br-d: #1a7f4b;
--br-e: #a83280; --br-f: #7d8894; --br-g: #0d7f8c;
"""
_DARK = """
--br-page: #12181f; --br-ink: #e4eaf0; --br-quiet: #9aa7b4; --br-line: #323d49; --br-soft: #1b232c;
--br-main: #6cb0ff; --br-raw: #3d6796; --br-band: #1f3149; --br-good: #5fca8f; --br-warn: #e6ae56;
--br-bad: #ff8a80; --br-off: #46525f; --br-a: #5a9fee; --br-b: #dba05a; --br-c: #a98be6; --br-d: #54b683;
--br-e: #d977b8; --br-f: #8592a0; --br-g: #4fb3bf;
"""
_RULES = """
.br-chart { max-width: 100%; height: auto; display: block; }
.br-text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--br-ink); }
.br-quiet { fill: var(--br-quiet); }
.br-halo { paint-order: stroke; stroke: var(--br-page); stroke-width: 5px; }
.br-strong { font-weight: 600; }
.br-on-bar { fill: var(--br-page); font-weight: 600; }
.br-axis { stroke: var(--br-quiet); stroke-width: 1; fill: none; }
.br-grid { stroke: var(--br-line); stroke-width: 1; fill: none; }
.br-band { fill: var(--br-band); stroke: none; }
.br-raw { stroke: var(--br-raw); stroke-width: 1; fill: none; }
.br-smooth { stroke: var(--br-main); stroke-width: 2.2; fill: none; stroke-linejoin: round; }
.br-rate { stroke: var(--br-good); stroke-width: 1.8; fill: none; stroke-linejoin: round; }
.br-dot { fill: var(--br-main); }
.br-mark { stroke: var(--br-quiet); stroke-width: 1; stroke-dasharray: 3 3; fill: none; }
.br-sign { fill: var(--br-ink); stroke: none; }
.br-came { fill: var(--br-good); }
.br-went { fill: var(--br-bad); }
.br-held { fill: var(--br-warn); }
.br-trains { fill: var(--br-good); }
.br-joining { fill: var(--br-band); stroke: var(--br-good); stroke-dasharray: 4 2; }
.br-paused { fill: var(--br-soft); stroke: var(--br-warn); stroke-dasharray: 2 2; }
.br-away { fill: none; stroke: var(--br-off); }
.br-data { fill: var(--br-c); }
.br-compute { fill: var(--br-a); }
.br-communication { fill: var(--br-b); }
.br-vote { fill: var(--br-e); }
.br-checkpoint { fill: var(--br-d); }
.br-other { fill: var(--br-f); }
.br-activations { fill: var(--br-g); }
.br-waiting { fill: var(--br-soft); stroke: var(--br-quiet); stroke-dasharray: 3 2; }
.br-link { stroke: var(--br-quiet); fill: none; }
.br-slow { stroke: var(--br-warn); stroke-dasharray: 5 3; }
.br-node { fill: var(--br-soft); stroke: var(--br-quiet); }
.br-node-trains { stroke: var(--br-good); stroke-width: 2; }
"""


def chart_style(root: str) -> str:
    """Return the style sheet with the variables of colours at one element, such as ``:root``."""
    return (
        f"{root} {{ color-scheme: light dark; {_LIGHT} }}\n"
        f"@media (prefers-color-scheme: dark) {{ {root} {{ {_DARK} }} }}\n"
        f"@media print {{ {root} {{ {_LIGHT} }} {root} * {{ print-color-adjust: exact; }} }}\n{_RULES}"
    )


CHART_STYLE = chart_style(":root")
"""Style sheet of all charts in a document of our own."""
