"""The first ten minutes of README.md, typed on a Windows host that trains with a Linux host.

    python -m benchmarks.mixed.transcript            print the session
    python -m benchmarks.mixed.transcript --write    and put it into docs/transcripts/windows.txt

A test types the session again and compares it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.agents.machines import REPOSITORY
from benchmarks.agents.transcript import NAMES, RUN_NAME, TRAIN, Session
from benchmarks.mixed.machines import MixedCommandLine, MixedMachine
from lab import LINUX, WINDOWS, Lab

WINDOWS_SESSION = REPOSITORY / "docs" / "transcripts" / "windows.txt"
_MAC, _PC = 0, 1
_PROMPTS = ("mac$", "C:\\spiral>")


def record_windows() -> str:
    """Return the session, as it is on the screens of both machines."""
    with (
        tempfile.TemporaryDirectory(prefix="by-win-", ignore_cleanup_errors=True) as directory,
        Lab(hosts=[LINUX, WINDOWS]) as lab,
    ):
        room = Path(directory)
        folder = room / "spiral"
        folder.mkdir()
        shutil.copy(TRAIN, folder)
        machines = [MixedMachine(host, room, name) for host, name in zip(lab.hosts, NAMES, strict=False)]
        session = Session(MixedCommandLine(machines), folder, _PROMPTS)
        _type_all(session, lab, machines)
        text = "\n".join(session.lines).strip() + "\n"
    return text.replace(str(room / "mac"), "/home/mac/.local/state/barnraise")


def _type_all(session: Session, lab: Lab, machines: list[MixedMachine]) -> None:
    session.say("The PC has Windows, the mac has another system. No address is typed.")
    session.type(_PC, "up", "--detach")
    session.type(_PC, "rename", "pc")
    waiting = session.open(_PC, "pair")
    session.join(waiting, _MAC)
    session.lines.append("# and on pc:")
    waiting.close()
    pc = machines[_PC]
    session.until(lambda: "2 of 2 machines are online" in pc.try_to_type("status").stdout, "both are online")
    session.type(_PC, "status")
    session.type(_PC, "doctor")
    view = session.open(_PC, "run", "train.py")
    view.show_until("epoch", 2)
    session.lines.append("# The mac loses its power.")
    lab.cut(*lab.hosts)  # a machine without power does not even refuse
    lab.hosts[_MAC].kill_all()
    view.show_until("disappeared")
    view.show_until("epoch", 2)
    match = RUN_NAME.search(view.output)
    assert match is not None, view.output
    run = match[1]
    session.type(_PC, "ps")
    session.type(_PC, "logs", run)
    session.type(_PC, "stop", run)
    session.lines.append("# and in the first window:")
    view.close()
    resumed = RUN_NAME.search(session.type(_PC, "resume", run))
    assert resumed is not None
    session.type(_PC, "export", resumed[1], "spiral-model")
    session.type(_PC, "down")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    text = record_windows()
    print(text, flush=True)
    if options.write:
        WINDOWS_SESSION.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
