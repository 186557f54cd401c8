"""Notice to the agent that the script raised an exception, sent before Python ends the process.

With torch loaded, the end takes seconds. Without the notice the other machines would only see a worker that
does not respond.
"""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType

from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import encode
from barnraise.agent_client.run_requests import FailingRequest
from barnraise.core.errors import BarnraiseError
from barnraise.training.group.agent_client import WorkerId

_SEND_S = 1.0


def install_failure_notice(worker: WorkerId) -> None:
    """Send the notice for each exception that nothing catches, then print it as before."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(BarnraiseError, OSError):
            _send(worker)
        previous(kind, error, trace)

    sys.excepthook = hook


def _send(worker: WorkerId) -> None:
    run, local_rank, start, *_ = worker
    client = ListenerClient.connect(worker.state)
    try:
        client.ask(encode(FailingRequest(run, local_rank, start)), _SEND_S)
    finally:
        client.close()
