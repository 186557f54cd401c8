"""`python -m lab list` shows labs; `clean` removes dead ones; `prepare` builds systems of other kinds."""

import argparse

from lab import janitor
from lab.systems import ARM64, WINDOWS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show the labs on this machine")
    clean = commands.add_parser("clean", help="remove what dead labs left behind")
    clean.add_argument("--all", action="store_true", help="also labs that are in use")
    prepare = commands.add_parser("prepare", help="build systems of other kinds for hosts, once")
    prepare.add_argument("systems", nargs="+", choices=["windows", "arm64"])
    chosen = parser.parse_args()
    if chosen.command == "prepare":
        for system in (WINDOWS, ARM64):
            if system.name in chosen.systems:
                system.prepare(print)
                print(f"{system.name}: {system.why_unavailable() or 'ready'}")
        return
    for lab in janitor.known_labs():
        orphan = janitor.is_orphan(lab)
        if chosen.command == "list":
            print(f"{lab}  {'left behind' if orphan else 'in use'}")
        elif orphan or chosen.all:
            janitor.remove(lab)
            print(f"{lab}  removed")


if __name__ == "__main__":
    main()
