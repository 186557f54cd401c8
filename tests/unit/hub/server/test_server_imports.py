"""A hub answers before torch is loaded, and does not load optional libraries."""

from __future__ import annotations

import os
import subprocess
import sys


def test_server_starts_without_what_it_needs_later() -> None:
    names = (
        "protocol.messages",
        "protocol.signatures",
        "protocol.invites",
        "rounds.state_machine",
        "aggregation.update_checks",
        "storage.log",
        "storage.blobs",
        "server.app",
        "server.server",
        "__main__",
    )
    program = "".join(f"import barnraise.hub.{name}\n" for name in names)
    later = {"torch", "botocore", "httpx", "numpy"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{program}import sys; sys.exit(not {later}.isdisjoint(sys.modules))",
        ],
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert done.returncode == 0
