"""A hub answers before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys


def test_only_what_merges_needs_torch() -> None:
    names = ("messages", "signing", "invites", "rounds", "admission", "log", "blobs", "app", "serving")
    program = "".join(f"import backyard.hub.{name}\n" for name in names)
    done = subprocess.run(
        [sys.executable, "-c", f"{program}import sys; sys.exit('torch' in sys.modules)"],
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert done.returncode == 0
