"""The sessions in the documents are what the commands really print."""

from __future__ import annotations

import re

import pytest

from benchmarks.agents.transcript import DOCUMENTS, README, TRAIN, normal, shown_script
from benchmarks.mixed.transcript import WINDOWS_SESSION, record_windows
from lab import WINDOWS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_transcript_in_docs_matches_real_commands(name: str) -> None:
    document = DOCUMENTS[name]
    written = normal(document.shown(document.file.read_text(encoding="utf-8")))
    assert normal(document.shown(document.record().text)) == written


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(WINDOWS.why_unavailable() is not None, reason=str(WINDOWS.why_unavailable()))
def test_transcript_of_windows_matches_real_commands() -> None:
    assert normal(record_windows()) == normal(WINDOWS_SESSION.read_text(encoding="utf-8"))


def test_readme_shows_whole_example() -> None:
    assert shown_script(README.read_text(encoding="utf-8")) == TRAIN.read_text(encoding="utf-8")


def test_readme_links_have_targets() -> None:
    text = README.read_text(encoding="utf-8")
    headings = {_anchor(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    for path, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if path:
            assert (README.parent / path).exists(), path
        else:
            assert anchor in headings, anchor


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
