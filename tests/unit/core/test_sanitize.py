from __future__ import annotations

import pytest

from barnraise.core.sanitize import (
    OutputFilter,
    coloured,
    forges_names,
    is_printable,
    printable,
    rewritten_line,
    rewritten_text,
)

CLIPBOARD = "\x1b]52;c;b3duZWQ=\x07"


def test_printable_keeps_letters_of_any_script() -> None:
    assert printable("Größe ≥ 3 × 日本") == "Größe ≥ 3 × 日本"


def test_printable_replaces_control_and_direction_characters() -> None:
    assert printable("a\x1b[2Jb\rc\nd\x9be\u202ef\u200bg\udc80") == "a?[2Jb?c?d?e?f?g?"


def test_printable_keeps_also_and_inserts_instead() -> None:
    assert printable("a\n\tb\x07", also="\n\t") == "a\n\tb?"
    assert printable("a\tb", instead=" ") == "a b"


def test_rewritten_line_is_what_a_terminal_shows_last() -> None:
    assert rewritten_line("10%\r20%\r30%") == "30%"
    assert rewritten_line("\r20%\r") == "20%"
    assert rewritten_line("plain") == "plain"
    assert rewritten_line("\r\x1b[Ka\x1b[31mb\x1b[0m\x1b[A") == "a\x1b[31mb\x1b[0m"


def test_rewritten_text_keeps_one_line_of_a_bar_below_another() -> None:
    inner = "".join(f"\n\rinner {place}\x1b[A" for place in range(5))
    assert rewritten_text(f"\router 0{inner}\nend") == "outer 0\ninner 4end"
    assert rewritten_text("a\n\r1%\r2%\nb\n") == "a\n2%\nb\n"


@pytest.mark.parametrize(
    "sign", ["\x00", "\x7f", "\x9b", "\u2028", "\u2029", "\u200b", "\u2066", "\ufeff", "\u00ad"]
)
def test_printable_replaces_each_invisible_sign(sign: str) -> None:
    assert printable(f"a{sign}b") == "a?b"
    assert not is_printable(f"a{sign}b")


@pytest.mark.parametrize("sign", ["\u3164", "\u2800", "\uffa0", "\u115f", "\ufe0f", "\U000e0101", "\u034f"])
def test_printable_replaces_signs_that_look_like_nothing(sign: str) -> None:
    assert printable(f"a{sign}b") == "a?b"


def test_printable_bounds_marks_on_one_letter() -> None:
    assert printable("Việt cafe\u0301") == "Việt cafe\u0301", "accents stay"
    flooded = printable("a" + "\u0301" * 500 + "b")
    assert flooded == "a" + "\u0301" * 3 + "?b"
    assert printable("\u0336x") == "?x", "it would strike out the letter of ours that is before it"


def test_printable_cuts_long_text() -> None:
    assert printable("x" * 100, limit=10) == "x" * 9 + "…"
    assert printable("x" * 10, limit=10) == "x" * 10


def test_coloured_passes_plain_colours_only() -> None:
    assert coloured("\x1b[1;31mred\x1b[0m") == "\x1b[1;31mred\x1b[0m\x1b[0m"
    assert (
        coloured("\x1b[38;5;200ma\x1b[48;2;1;2;3mb\x1b[m") == "\x1b[38;5;200ma\x1b[48;2;1;2;3mb\x1b[m\x1b[0m"
    )
    assert coloured("\x1b[8mhidden\x1b[28m") == "hidden"
    assert coloured("\x1b[0;7minverse") == "inverse"
    assert coloured("a\tb") == "a\tb"


@pytest.mark.parametrize(
    "command", [CLIPBOARD, "\x1b]0;owned\x07", "\x1b[2J", "\x1b[6n", "\x9b2J", "\x1bP+q\x1b\\", "\r", "\x08"]
)
def test_coloured_passes_no_other_command(command: str) -> None:
    shown = coloured(f"a{command}b")
    assert not set(shown) & set(map(chr, (*range(32), *range(127, 160)))), shown


def test_output_filter_joins_colours_and_letters_of_two_parts() -> None:
    stream = OutputFilter()
    parts = [
        "é\x1b[31".encode()[:1],
        "é\x1b[31".encode()[1:],
        b"mred\x1b",
        b"[0m\r10%\n\x1b[",
        b"Aup",
        CLIPBOARD.encode(),
    ]
    assert "".join(map(stream.feed, parts)) == "é\x1b[31mred\x1b[0m\r10%\nup?]52;c;b3duZWQ=?"


def test_forges_names_is_true_for_control_and_direction() -> None:
    assert all(map(forges_names, "\x85\x9b\u202e\u2067\u2028\x1b"))
    assert not any(map(forges_names, "aé日\u200d 😀"))
