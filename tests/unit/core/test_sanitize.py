from __future__ import annotations

from barnraise.core.sanitize import printable


def test_letters_of_any_script_stay() -> None:
    assert printable("Größe ≥ 3 × 日本") == "Größe ≥ 3 × 日本"


def test_nothing_commands_the_terminal_or_turns_text_around() -> None:
    assert printable("a\x1b[2Jb\rc\nd\x9be\u202ef\u200bg\udc80") == "a?[2Jb?c?d?e?f?g?"


def test_what_else_may_stay_and_what_stands_for_the_rest() -> None:
    assert printable("a\n\tb\x07", also="\n\t") == "a\n\tb?"
    assert printable("a\tb", instead=" ") == "a b"
