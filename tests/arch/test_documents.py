"""Links between documents lead somewhere, and so do the pages that the source names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.arch.source_tree import ROOT, files

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_PAGE = re.compile(r"\bdocs/[\w/.-]+\.md\b")


def documents() -> list[Path]:
    """Find all pages of this repository."""
    folders = ("benchmarks", "docs", "examples", "lab", "src", "tests", ".github")
    nested = [page for folder in folders for page in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *nested])


def _anchors(text: str) -> set[str]:
    """Name the headings of a page as GitHub does."""
    anchors = set()
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchors.add(re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-"))
    return anchors


def _broken(page: Path, text: str) -> list[str]:
    """Find the links of a page that lead to no file, or to no heading of it."""
    broken = []
    for target in _LINK.findall(_FENCED.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        if not place.exists() or (anchor and anchor not in _anchors(place.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def test_links_of_all_documents_lead_to_a_file_and_a_heading() -> None:
    pages = documents()
    assert len(pages) > 100, "all of them were found"
    broken = {str(page.relative_to(ROOT)): _broken(page, page.read_text(encoding="utf-8")) for page in pages}
    assert {page: links for page, links in broken.items() if links} == {}


def test_pages_that_the_source_names_exist() -> None:
    named = {(page, file) for file in files() for page in _PAGE.findall(file.read_text(encoding="utf-8"))}
    assert named
    assert sorted({(page, file.name) for page, file in named if not (ROOT / page).exists()}) == []


def test_files_that_the_page_of_origins_names_exist() -> None:
    text = (ROOT / "docs" / "origins.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(named) > 100, "all of them were found"
    homes = (ROOT / "src" / "barnraise", ROOT / "tests", ROOT / "examples")
    assert sorted(name for name in named if not any((home / name).exists() for home in homes)) == []


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("README.md", False),
        ("README.md#install", False),
        ("#a-heading-of-two-parts", False),
        ("https://example.org/nothing", False),
        ("NO-SUCH.md", True),
        ("README.md#no-such-heading", True),
        ("#no-such-heading", True),
    ],
)
def test_link_without_target_is_found(link: str, is_broken: bool, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = f"# A `heading`, of two parts\n\n[a link]({link})\n\n```\n[no link](NOWHERE.md)\n```\n"
    page.write_text(text, encoding="utf-8")
    (tmp_path / "README.md").write_text("## Install\n", encoding="utf-8")
    assert _broken(page, text) == ([link] if is_broken else [])
