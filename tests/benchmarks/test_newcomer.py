"""Judgements of recorded terminals: silences, wide lines, and the text that people read."""

from __future__ import annotations

import pytest

from benchmarks.newcomer.recording import owner_of, silent_seconds, text_with_times, wide_lines
from lab.terminal import Printed, Screen, TypedCommand


def _command(*printed: tuple[float, str], end_s: float | None = None) -> TypedCommand:
    return TypedCommand("barnraise run", 10.0, [Printed(at, text) for at, text in printed], end_s)


def test_silence_counts_only_what_exceeds_two_seconds() -> None:
    assert silent_seconds(_command((11.0, "a"), (12.5, "b"), end_s=14.0), 99.0) == 0.0
    assert silent_seconds(_command((11.0, "a"), (16.0, "b"), end_s=19.0), 99.0) == pytest.approx(3.0 + 1.0)


def test_silence_of_command_that_still_runs_ends_now() -> None:
    assert silent_seconds(_command((10.5, "a")), 20.5) == pytest.approx(8.0)


def test_line_that_is_redrawn_unchanged_is_silence() -> None:
    same = _command((11.0, "\rworking"), (12.0, "\r\x1b[Kworking"), (13.0, "\rworking"), end_s=14.0)
    assert silent_seconds(same, 99.0) == pytest.approx(1.0)
    changing = _command((11.0, "\rworking 1"), (12.0, "\rworking 2"), (13.0, "\rworking 3"), end_s=14.0)
    assert silent_seconds(changing, 99.0) == 0.0


def test_question_that_waits_for_a_person_is_no_silence() -> None:
    question = _command((11.0, "Install torch now? [Y/n]: "), (60.0, "\r\n"), (61.0, "unpacking"), end_s=62.0)
    assert silent_seconds(question, 99.0) == 0.0


def test_wide_lines_are_counted_without_colours_and_padding() -> None:
    fits, wide = "x" * 80, "x" * 81
    command = _command((11.0, f"\x1b[2m{fits}\x1b[0m   \r\n"), (12.0, f"{wide}\r\nshort\r{wide}\r\n"))
    assert wide_lines(command) == [wide, wide]


@pytest.mark.parametrize(
    ("line", "owner"),
    [
        ("python3 -m venv .venv", "venv"),
        ("pip install .", "pip"),
        (".venv/bin/pip install .", "pip"),
        (".venv/bin/barnraise join 1-a-b", "ours"),
        ("cd ~/spiral", "ours"),
    ],
)
def test_owner_of_command_is_its_program(line: str, owner: str) -> None:
    assert owner_of(line) == owner


def test_screen_shows_the_last_text_of_each_line() -> None:
    screen = Screen()
    screen.show("mac$ run\r\n 10%|#   |\r 50%|##  |\r100%|####|\r\n\x1b[1mdone\x1b[0m\r\nabc\r\x1b[Kx\r\n")
    assert screen.lines == ["mac$ run", "100%|####|", "done", "x", ""]
    screen.show("\x1b[2Aover\x1b[2Bend")
    assert screen.lines == ["mac$ run", "100%|####|", "over", "x", "    end"]


def test_text_with_times_gives_each_line_its_last_change() -> None:
    text = text_with_times([Printed(5.0, "one\r\ntw"), Printed(6.5, "o\r\n\r\nthree")], 4.0)
    assert text == "     1.0  one\n     2.5  two\n          \n     2.5  three\n"
