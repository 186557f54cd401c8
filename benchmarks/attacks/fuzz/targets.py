"""Run targets of the fuzzer with bounds: each case ends soon, and memory does not grow."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

from barnraise.core.errors import BarnraiseError
from benchmarks.attacks.fuzz import protocols
from benchmarks.attacks.fuzz.corpus import seeds_of
from benchmarks.attacks.fuzz.mutation import hostile
from benchmarks.attacks.fuzz.parsers import Parser, all_parsers
from benchmarks.attacks.fuzz.protocols import GROUP

MAX_CASE_S = 2.0  # of processor time; most cases take microseconds
MAX_PEAK = 96 << 20  # more memory at once than before the target ran
Target = Callable[[Random], None]
SESSIONS: dict[str, Target] = {
    "reader": protocols.reader_cases,
    "handshake": protocols.handshake_cases,
    "engine": protocols.engine_cases,
}
_COUNTS_TENTH = ("reader", "handshake")  # one seed gives a tenth of the cases there


class FuzzError(AssertionError):
    """Error of a parser that took too long, grew, or raised another error than ours."""


def target_names() -> list[str]:
    """Return all targets: sessions first, then every parser."""
    return [*SESSIONS, *all_parsers()]


def cases_of(name: str) -> int:
    return GROUP // 10 if name in _COUNTS_TENTH else GROUP


@functools.cache
def _seeds(name: str) -> tuple[bytes, ...]:
    """Return the corpus of a parser, and what its types give today."""
    return tuple(dict.fromkeys([*seeds_of(name), *all_parsers()[name].seeds()]))


def accepted(name: str, seeds: Sequence[bytes] | None = None) -> int:
    """Return how many seeds the parser accepts; raise FuzzError if one breaks it."""
    parser = all_parsers()[name]
    return sum(try_input(parser, seed) for seed in (_seeds(name) if seeds is None else seeds))


def try_input(parser: Parser, data: bytes) -> bool:
    """Return True if the parser accepts the bytes, and False if it rejects them with an error of ours."""
    begin = time.process_time()
    try:
        parser.parse(data)
        is_accepted = True
    except BarnraiseError:
        is_accepted = False
    except Exception as error:
        raise FuzzError(
            f"{parser.name} raised {type(error).__name__}: {error}\ninput: {data[:300].hex()}"
        ) from error
    spent = time.process_time() - begin
    if spent > MAX_CASE_S:
        raise FuzzError(f"{parser.name} took {spent:.1f} s\ninput: {data[:300].hex()}")
    return is_accepted


def parser_cases(parser: Parser, random: Random) -> None:
    """Try one group of mutated seeds."""
    for _ in range(GROUP):
        try_input(parser, hostile(random, _seeds(parser.name)))


def run_target(name: str, cases: int, seed: int) -> Iterator[int]:
    """Run ``cases`` cases; yield how many are done after each seed."""
    session = SESSIONS.get(name)
    target = session if session is not None else functools.partial(parser_cases, all_parsers()[name])
    before, done = _peak(), 0
    while done < cases:
        try:
            target(Random(f"{name}/{seed}"))
        except BaseException as error:
            error.add_note(
                f"again: python -m benchmarks.attacks.fuzz --target {name} --seed {seed} --cases 1"
            )
            raise
        done += cases_of(name)
        seed += 1
        yield done
    grown = _peak() - before
    if grown > MAX_PEAK:
        raise FuzzError(f"{name}: the process held {grown >> 20} MB more at once")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
