"""Attack real processes in the lab, while honest work goes on, and judge each attack by its effect.

    python -m benchmarks.attacks --quick             every attack but the long ones
    python -m benchmarks.attacks                     all
    python -m benchmarks.attacks --only ID --only ID
    python -m benchmarks.attacks --list              print the attacks, start nothing

One line for each attack: refused or not, its id, the role, what was tried, how it ended. The last line is
one JSON object. The exit code is 0 only if no attack succeeded, none disturbed honest work, and all were
judged. Needs root on Linux (docs/lab.md).
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.attacks.judging import figures, judge_all
from benchmarks.attacks.registry import Attack, all_attacks
from benchmarks.report import environment_line, last_line
from lab import why_unavailable


def selected(attacks: list[Attack], *, quick: bool, only: list[str]) -> list[Attack]:
    """Return the attacks to run; raise SystemExit if a named one does not exist."""
    unknown = set(only) - {attack.id for attack in attacks}
    if unknown:
        raise SystemExit(f"there is no attack {', '.join(sorted(unknown))}: see --list")
    if only:
        return [attack for attack in attacks if attack.id in only]
    return [attack for attack in attacks if not (quick and attack.tier == "full")]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="leave out the long ones")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="this attack; repeatable")
    parser.add_argument("--list", action="store_true", help="print the attacks, start nothing")
    options = parser.parse_args(arguments)
    attacks = selected(all_attacks(), quick=options.quick, only=options.only)
    if options.list:
        for attack in attacks:
            print(f"{attack.id}: {attack.role}: {attack.text} ({attack.tier})")
        return 0
    reason = why_unavailable()
    if reason is not None:
        raise SystemExit(f"the lab is not available: {reason}")
    print(environment_line(), flush=True)
    judgements = []
    for judgement in judge_all(attacks):
        judgements.append(judgement)
        print(judgement.line(), flush=True)
    counts = figures(judgements)
    last_line(counts)
    return 0 if counts["attacks"] and sum(counts.values()) == counts["attacks"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
