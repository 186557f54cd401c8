"""Elements of HTML and SVG, and their text. What is not ours cannot become markup. Pure."""

from __future__ import annotations

import math
from xml.etree import ElementTree  # builds and writes only; nothing is parsed

from barnraise.core.sanitize import printable

Element = ElementTree.Element
Child = ElementTree.Element | str | None
Attribute = str | float | None

SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def element(tag: str, /, *children: Child, **attributes: Attribute) -> Element:
    """Return an element with its children.

    In attribute names, ``_`` stands for ``-``, and one at the end is dropped. A child or an attribute that is
    None is left out.
    """
    made = ElementTree.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), _attribute(value))
    append(made, *children)
    return made


def append(parent: Element, *children: Child) -> None:
    """Append elements and texts; control characters of texts are replaced."""
    for child in children:
        if isinstance(child, str):
            _append_text(parent, printable(child, also="\n\t"))
        elif child is not None:
            parent.append(child)


def svg(width: float, height: float, label: str, *children: Child) -> Element:
    """Return a picture of this size that shrinks with its place. ``label``: what it shows, in words."""
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {_attribute(width)} {_attribute(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
        class_="br-chart",
    )


def markup(root: Element) -> str:
    """Return the HTML text of an element."""
    return ElementTree.tostring(root, encoding="unicode", method="html")


def svg_file(picture: Element, style: str) -> str:
    """Return the text of an SVG file that needs no other file. ``style``: style sheet of ours."""
    attributes = {"xmlns": SVG_NAMESPACE, **picture.attrib}
    root = ElementTree.Element("svg", attributes)
    sheet = ElementTree.SubElement(root, "style")
    sheet.text = style
    root.extend(picture)
    return ElementTree.tostring(root, encoding="unicode", method="xml")


def _append_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return printable(value)
    assert math.isfinite(value), "a chart places finite numbers only"
    return f"{value:.1f}".removesuffix(".0")
