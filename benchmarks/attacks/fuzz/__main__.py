"""Feed every parser that another machine can reach with malformed bytes.

    python -m benchmarks.attacks.fuzz --quick          about 200 cases for each parser
    python -m benchmarks.attacks.fuzz                  about 10,000 cases for each parser
    python -m benchmarks.attacks.fuzz --target engine --seed 17 --cases 400
    python -m benchmarks.attacks.fuzz --record         add valid messages to the corpus in tests/corpus

A case passes when the bytes are accepted or rejected with a Barnraise error, soon and in little memory.
Anything else stops the run and reports the target and seed that reproduce it. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time

from benchmarks.attacks.fuzz import corpus
from benchmarks.attacks.fuzz.parsers import all_parsers
from benchmarks.attacks.fuzz.targets import accepted, run_target, target_names
from benchmarks.report import environment_line, last_line, table

_HANG_S = 300.0  # for one target's group of cases, on a busy machine


def record() -> int:
    """Add what each parser accepts to its corpus."""
    for parser in all_parsers().values():
        if parser.is_random and accepted(parser.name, corpus.seeds_of(parser.name)):
            continue
        new = corpus.add(parser.name, parser.seeds())
        if new:
            print(f"{parser.name}: {new} new inputs")
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="about 200 cases for each parser")
    parser.add_argument("--cases", type=int, default=None, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=target_names(), default=None)
    parser.add_argument("--record", action="store_true", help="add valid messages to the corpus")
    options = parser.parse_args(arguments)
    if options.record:
        return record()
    cases = options.cases or (200 if options.quick else 10_000)
    print(environment_line())
    rows, total = [], 0
    for name in [options.target] if options.target else target_names():
        begin, done = time.monotonic(), 0
        faulthandler.dump_traceback_later(_HANG_S, exit=True)  # a hang in C ends only so
        for count in run_target(name, cases, options.seed):
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            done = count
        total += done
        rows.append((name, done, f"{done / (time.monotonic() - begin):.0f}"))
    faulthandler.cancel_dump_traceback_later()
    print(table(("target", "cases", "per second"), rows))
    last_line({"fuzz_targets": len(rows), "fuzz_cases": total, "fuzz_crashes": 0})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
