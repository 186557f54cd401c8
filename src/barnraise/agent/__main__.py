"""``python -m barnraise.agent``: the agent without a display, until it is told to end."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from barnraise.agent.serving import serve
from barnraise.core.config import load_settings
from barnraise.core.errors import BarnraiseError


def main() -> int:
    parser = argparse.ArgumentParser(prog="barnraise-agent", description="This machine's agent.")
    parser.add_argument("--psk-file", type=Path)
    parser.add_argument("--witness", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("zeroconf").setLevel(logging.ERROR)
    try:
        return serve(load_settings(), psk_file=options.psk_file, witness=options.witness)
    except BarnraiseError as error:
        print(error, file=sys.stderr)  # noqa: T201  # before there is anybody else to tell
        return 1


if __name__ == "__main__":
    sys.exit(main())
