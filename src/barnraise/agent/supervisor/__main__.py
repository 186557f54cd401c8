"""``python -P -m barnraise.agent.supervisor``: started by an agent, which talks to it over pipes."""

from __future__ import annotations

import io
import os
import signal
import sys

from barnraise.agent.supervisor.main import Supervisor
from barnraise.agent.supervisor.messages import MARK_VARIABLE, Stop, read_launch
from barnraise.agent.supervisor.policy import InputEnded
from barnraise.core.errors import BarnraiseError
from barnraise.core.flow.termination import on_termination


def main() -> int:
    """Run a supervisor for the launch request on standard input, and return the exit code."""
    # Duplicated descriptors: a print from anywhere must not mix with the events.
    source = io.FileIO(os.dup(0), "rb")
    sink = io.FileIO(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        launch = read_launch(source)
    except BarnraiseError as error:
        print(error, file=sys.stderr)  # noqa: T201  # the agent's own log
        return 2
    if launch is None:
        return 0
    if sys.platform == "win32":
        from barnraise.agent.supervisor.windows_job import Job, kernel32

        Job(kernel32()).take_this_process()  # all descendants are killed with this process
    supervisor = Supervisor(launch, os.environ[MARK_VARIABLE], source, sink)
    # Handlers and not SIG_IGN, which the workers would inherit.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    on_termination(lambda number, frame: supervisor.post(Stop()))
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, lambda number, frame: supervisor.post(InputEnded()))
    supervisor.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
