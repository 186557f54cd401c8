"""torch's own RPC runs within a machine or a trusted network, and is refused between machines otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import barnraise

# In a process of its own: torch is changed there for good.
TRY = """
import os, sys
from torch.distributed import rpc
from barnraise.collectives.torch_patch.torch_rpc import refuse_rpc_in_plaintext
from barnraise.core.errors import BarnraiseError

refuse_rpc_in_plaintext(os.environ)
refuse_rpc_in_plaintext(os.environ)
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[1])
try:
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
except BarnraiseError as error:
    print("refused:", error)
else:
    print("computed", rpc.rpc_sync("me", max, args=(3, 5)))
    rpc.shutdown()
"""


def run_try(place: Path, machines: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRY, str(place / "store")],
        env={
            **kept,
            **variables,
            "BARNRAISE_MACHINES": machines,
            "PYTHONPATH": str(Path(barnraise.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_rpc_between_machines_is_refused_with_what_to_use(tmp_path: Path) -> None:
    printed = run_try(tmp_path, "0,0,1")
    assert "refused: [unsupported-operation] torch's RPC is not used between machines" in printed
    assert "it sends plaintext" in printed
    assert "barnraise.rpc" in printed
    assert "--trust-fabric" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "fabric"), [("0,0", "untrusted"), ("0,1", "trusted")], ids=["one machine", "trusted network"]
)
def test_rpc_runs_where_nothing_listens(tmp_path: Path, machines: str, fabric: str) -> None:
    assert run_try(tmp_path, machines, BARNRAISE_FABRIC=fabric) == "computed 5\n"
