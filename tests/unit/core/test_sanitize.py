from __future__ import annotations

from barnraise.core.sanitize import printable, rewritten_line, rewritten_text


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
