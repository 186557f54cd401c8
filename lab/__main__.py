"""`python -m lab list` shows labs; `python -m lab clean` removes those whose owner is gone."""

import argparse

from lab import janitor


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show the labs on this machine")
    clean = commands.add_parser("clean", help="remove what dead labs left behind")
    clean.add_argument("--all", action="store_true", help="also labs that are in use")
    chosen = parser.parse_args()
    for lab in janitor.known_labs():
        orphan = janitor.is_orphan(lab)
        if chosen.command == "list":
            print(f"{lab}  {'left behind' if orphan else 'in use'}")
        elif orphan or chosen.all:
            janitor.remove(lab)
            print(f"{lab}  removed")


if __name__ == "__main__":
    main()
