"""Layout of a report: sections, tables, figures in two widths, and the page around them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from barnraise.display.charts.elements import Child, Element, element, markup
from barnraise.display.charts.theme import CHART_STYLE

WIDE, NARROW = 720, 340
_MOST_NARROW_COLUMNS = 4  # of a table that a phone can show
_MOST_UNBROKEN = 16  # letters of a cell
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = f"""{CHART_STYLE}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--br-page); color: var(--br-ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }}
main {{ max-width: 760px; margin: 0 auto; padding: 20px; }}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 32px 0 8px; padding-top: 12px; border-top: 1px solid var(--br-line); }}
h3 {{ font-size: 1rem; margin: 18px 0 4px; overflow-wrap: anywhere; }}
p {{ margin: 0 0 8px; overflow-wrap: anywhere; }}
.lead {{ font-size: 1.15rem; }}
.quiet, figcaption, caption {{ color: var(--br-quiet); font-size: 0.87rem; }}
caption {{ text-align: left; padding-bottom: 4px; }}
.warning {{ border-left: 4px solid var(--br-warn); padding: 4px 10px; background: var(--br-soft); }}
.error {{ border-left: 4px solid var(--br-bad); padding: 4px 10px; background: var(--br-soft); }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: 8px;
  margin: 14px 0; }}
.tiles div {{ background: var(--br-soft); border-radius: 6px; padding: 8px 10px; }}
.tiles dt {{ color: var(--br-quiet); font-size: 0.8rem; }}
.tiles dd {{ margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }}
figure {{ margin: 10px 0 16px; }}
.narrow {{ display: none; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 0.87rem; margin: 6px 0 14px; }}
th, td {{ text-align: left; vertical-align: top; padding: 4px 10px 4px 0;
  border-bottom: 1px solid var(--br-line); overflow-wrap: anywhere; }}
th {{ color: var(--br-quiet); font-weight: 600; white-space: nowrap; }}
td.number {{ font-variant-numeric: tabular-nums; white-space: nowrap; }}
pre, code {{ font-family: ui-monospace, "SF Mono", Consolas, monospace; font-size: 0.87rem; }}
pre {{ background: var(--br-soft); padding: 10px; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
footer {{ margin-top: 32px; color: var(--br-quiet); font-size: 0.8rem; }}
@media (max-width: 520px) {{
  main {{ padding: 14px; }}
  .wide {{ display: none; }}
  .narrow {{ display: block; }}
  .tiles {{ grid-template-columns: 1fr 1fr; }}
  table.cards thead {{ display: none; }}
  table.cards tr {{ display: block; padding: 6px 0; border-bottom: 1px solid var(--br-line); }}
  table.cards td {{ display: block; border: 0; padding: 1px 0; white-space: normal; }}
  table.cards td:first-child {{ font-weight: 600; }}
  table.cards td[data-name]::before {{ content: attr(data-name) ": "; color: var(--br-quiet); }}
}}
@media print {{
  main {{ max-width: none; padding: 0; }}
  .wide {{ display: block; }}
  .narrow {{ display: none; }}
  figure, tr, .tiles {{ break-inside: avoid; }}
  h2, h3 {{ break-after: avoid; }}
}}
"""


def page(title: str, *content: Child) -> str:
    """Return a whole HTML document; a browser that opens it may not load anything else."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", STYLE),
    )
    body = element("body", element("main", *content))
    return f"<!DOCTYPE html>\n{markup(element('html', head, body, lang='en'))}\n"


def section(title: str, *content: Child) -> Element:
    """Return a section with its heading."""
    return element("section", element("h2", title), *content)


def paragraphs(sentences: Sequence[str], kind: str | None = None) -> Element | None:
    """Return sentences as one paragraph; None if there are none."""
    return element("p", " ".join(sentences), class_=kind) if sentences else None


def figure(draw: Callable[[float], Element], caption: str = "") -> Element:
    """Return a chart drawn twice: for screens and paper, and for phones."""
    return element(
        "figure",
        element("div", draw(WIDE), class_="wide"),
        element("div", draw(NARROW), class_="narrow"),
        element("figcaption", caption) if caption else None,
    )


def tiles(pairs: Iterable[tuple[str, str]]) -> Element:
    """Return figures with their names, in boxes."""
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", value)) for name, value in pairs),
        class_="tiles",
    )


def table(heading: Sequence[str], rows: Sequence[Sequence[Child]], caption: str = "") -> Element:
    """Return a table without the columns that have no value. On a phone, each row of a wide one is a card."""
    shown = [
        column
        for column in range(len(heading))
        if any(not isinstance(row[column], str) or row[column] not in ("", "–") for row in rows)
    ]
    head = element("tr", *(element("th", heading[column], scope="col") for column in shown))
    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", head),
        element(
            "tbody",
            *(
                element("tr", *(_cell(heading[column], row[column], column == 0) for column in shown))
                for row in rows
            ),
        ),
        class_="cards" if len(shown) > _MOST_NARROW_COLUMNS else None,
    )


def _cell(name: str, value: Child, is_first: bool) -> Element:
    kind = "number" if isinstance(value, str) and len(value) <= _MOST_UNBROKEN else None
    return element("td", value, class_=kind, data_name=None if is_first else name)
