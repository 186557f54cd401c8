"""First process of a sandbox: starts the script, passes its exit code on, and serves as its HTTP proxy.

The sandbox has no network. Programs that know HTTP proxies reach public addresses through this one, which
asks the broker for each connection. Started by ``python -P -m barnraise.sandbox.inside COMMAND...``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from barnraise.sandbox.proxy import start_proxy
from barnraise.sandbox.spec import script_environment
from barnraise.transport.ipc.dial_request import BROKER_VARIABLE

PROXY_PORT_VARIABLE = "BARNRAISE_PROXY_PORT"  # where the profile of the sandbox permits one port only
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")


def main(command: list[str]) -> int:
    """Run the command until it exits; return its exit code, or 128 plus the signal that killed it."""
    if sys.platform == "win32":
        raise NotImplementedError("Windows has no sandbox")
    environment = script_environment(os.environ)
    if broker := os.environ.get(BROKER_VARIABLE):
        port = start_proxy(broker, int(os.environ.get(PROXY_PORT_VARIABLE, "0")))
        address = f"http://127.0.0.1:{port}"
        environment |= dict.fromkeys(PROXY_VARIABLES, address)
    # The signal reaches the script by itself, in the same process group.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command, env=environment)
    while True:
        pid, status = os.wait()  # as the first process it is the parent of every orphan, too
        if pid == process.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
