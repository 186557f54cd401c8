"""Pages of errors and checks in a terminal: which are found, and how they read."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from barnraise.cli.explain import WHEEL_FOLDER, list_pages, read_pages, render
from barnraise.cli.main import app
from tests.repository import ROOT

PAGES = read_pages()


def type_words(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *words], prog_name="barnraise")
    return done.exit_code, done.output


@pytest.mark.parametrize(("folder", "name"), list(PAGES))
def test_page_is_at_most_80_columns_wide_outside_of_code(folder: str, name: str) -> None:
    page = PAGES[folder, name]
    text = render(page, 80)
    assert text.startswith(f"{name}: ")
    assert "](" not in text
    assert not [line for line in text.splitlines() if len(line) > 80 and line.strip() not in page]
    assert len(text.split()) > 20


def test_names_without_a_code_are_listed_with_one_line_each() -> None:
    code, output = type_words()
    assert code == 0
    assert all(f"\n  {name} " in output for _, name in PAGES)
    assert max(map(len, output.splitlines())) <= 80
    assert output.strip() == list_pages(PAGES)


@pytest.mark.parametrize("typed", ["pairing", "[pairing]", "PAIRING"])
def test_code_is_explained_in_every_spelling(typed: str) -> None:
    code, output = type_words(typed)
    assert code == 0
    assert output.startswith("pairing: two machines could not be paired\n====")
    assert "WHAT TO DO\n\n- Run `barnraise pair` again" in output


def test_code_that_is_also_a_check_shows_both_pages() -> None:
    output = type_words("agent")[1]
    assert output.count("WHAT TO DO") == 2


def test_mistyped_code_gets_a_suggestion() -> None:
    code, output = type_words("pairng")
    assert code == 2
    assert "Did you mean pairing?" in output
    assert "Did you mean" not in type_words("xyzzy")[1]


def test_marks_become_plain_text() -> None:
    page = (
        "# `a`: title\n\n## Part\n\nSee [`b`](b.md), and more.\n\n| Head | |\n|---|---|\n| x | y |\n\n"
        "1. One:\n\n   ```\n   long command\n   ```\n"
    )
    assert render(page, 20).splitlines() == [
        *("a: title", "========", "", "PART", "", "See `b`, and more.", "", "- x: y", "", "1. One:", ""),
        "       long command",
    ]


def test_error_of_a_command_names_its_page(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "barnraise.cli.main", "adapt", str(tmp_path / "absent.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "     More: barnraise explain run"


def test_wheel_contains_every_page(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if "No module named hatchling" in done.stderr:
        pytest.skip("hatchling is not installed here")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [page for page in PAGES if f"barnraise/{WHEEL_FOLDER}/{page[0]}/{page[1]}.md" not in names]
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    script = "from barnraise.cli.explain import run; run('pairing')"
    shown = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={"PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout.startswith("pairing: two machines"), shown.stderr
