from __future__ import annotations

from barnraise.core.sanitize import printable


def test_printable_keeps_letters_of_any_script() -> None:
    assert printable("Größe ≥ 3 × 日本") == "Größe ≥ 3 × 日本"


def test_printable_replaces_control_and_direction_characters() -> None:
    assert printable("a\x1b[2Jb\rc\nd\x9be\u202ef\u200bg\udc80") == "a?[2Jb?c?d?e?f?g?"


def test_printable_keeps_also_and_inserts_instead() -> None:
    assert printable("a\n\tb\x07", also="\n\t") == "a\n\tb?"
    assert printable("a\tb", instead=" ") == "a b"
