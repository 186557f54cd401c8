"""Parts: a tracker that cannot delete steps gets a new part after a rollback, with all that counts. Pure.

A part is what the tracker calls a run. Its number is in its name: RUN, RUN.2, RUN.3. The last one counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

PROJECT = "barnraise"
_DIGEST_LENGTH = 8


def part_name(run: str, number: int) -> str:
    """Return the name of a part; no run has such a name, because a name of a run has no dot."""
    return run if number == 1 else f"{run}.{number}"


def current_part(is_replaced: Callable[[int], bool]) -> int:
    """Return the number of the first part that no other one has replaced."""
    number = 1
    while is_replaced(number):
        number += 1
    return number


def replacement_text(step: int, name: str) -> str:
    """Return what is written at a part that does not count any more."""
    return f"training went back to step {step}; {name} has the steps that count"


def restricted_name(name: str, allowed: str) -> str:
    """Return a name of allowed characters: the name itself, or one that no other name becomes."""
    rest = re.sub(rf"[^{allowed}]", "_", name)
    if rest == name:
        return name
    return f"{rest}_{hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_LENGTH]}"
