"""The pickle guard rejects unpickling in a group with a guest, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import barnraise

# In a process of its own: torch is changed there for good, by its own way of loading the backend.
TRIES = """
import io, pickle, sys
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, rpc
from barnraise.agent_client.run_requests import GuestRow, RolesResponse
from barnraise.collectives.torch_patch import pickle_guard
from barnraise.core.errors import UntrustedPickle

here, owner, guest = b"\\1" * 32, b"\\2" * 32, b"\\7" * 32
in_run = sys.argv[2] == "in a run"
pickle_guard.ask_roles = lambda settings, run, launched: RolesResponse(
    here=here, owners=(here, owner), guests=(GuestRow(guest, "friend", in_run),))
pickle_guard.install_pickle_guard()

class Group(dist.ProcessGroup):
    def __init__(self, world, **known):
        super().__init__(0, world)
        vars(self).update(known)
        self.getBackendName = lambda: "gloo"

class Bomb:
    def __reduce__(self):
        return open, (sys.argv[1], "w")

bytes_ = torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8)
dist.get_backend = lambda group: "gloo"

def refused(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except UntrustedPickle as error:
        return str(error)
    raise SystemExit(f"{call} was not refused")

for mixed in (Group(2, nodes=(guest,)), Group(3, nodes=(owner, guest)), Group(2, nodes=(b"",))):
    read = distributed_c10d._tensor_to_object
    assert "is a guest" in refused(read, bytes_, bytes_.numel(), mixed)
    refused(dist.all_gather_object, [None, None], 1, group=mixed)
    refused(dist.all_gather_object, [None, None], 1, mixed)
    refused(dist.gather_object, 1, [None, None], group=mixed)
    refused(dist.broadcast_object_list, [1], 0, mixed)
    refused(dist.scatter_object_list, [None], [1, 2], 0, group=mixed)
    refused(dist.send_object_list, [1], 1, mixed)
    refused(dist.recv_object_list, [None], 1, group=mixed)
print(refused(dist.all_gather_object, [None, None], 1, group=Group(2, nodes=(guest,))))
if in_run:
  print(refused(dist.all_gather_object, [None, None], 1, group=Group(2)))
  print(refused(rpc.init_rpc, "me", rank=0, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method="file://" + sys.argv[1] + ".store")))

plain = torch.frombuffer(bytearray(pickle.dumps("word")), dtype=torch.uint8)
others = [] if in_run else [Group(2)]  # another backend, in a run without a guest
for clean in (Group(2, nodes=(owner,)), Group(2, nodes=(here,)), Group(1), *others):
    assert distributed_c10d._tensor_to_object(plain, plain.numel(), clean) == "word"

from torch.distributed.checkpoint._pg_transport import PGTransport
mixed = Group(2, nodes=(guest,))
refused(PGTransport(mixed, None, torch.device("cpu")).recv_checkpoint, 1)
if in_run:
    from torch.distributed.optim import zero_redundancy_optimizer as zero
    refused(zero._broadcast_object, None, 1, mixed)
    refused(zero._broadcast_object, None, 1, group=mixed)
try:
    dist.all_gather_object([None], 1)
except ValueError as error:
    print("torch says:", error)
"""


def run_tries(canary: Path, where: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRIES, str(canary), where],
        env={**kept, "PYTHONPATH": str(Path(barnraise.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not canary.exists(), "it was executed"
    assert "friend is a guest in this group" in done.stdout
    assert "-> Send tensors instead (all_gather, or run.gather of a session)" in done.stdout
    assert "torch says: Default process group has not been initialized" in done.stdout
    return done.stdout


@pytest.mark.slow
def test_torch_does_not_unpickle_data_of_a_guest_of_the_run(tmp_path: Path) -> None:
    printed = run_tries(tmp_path / "canary", "in a run")
    assert "a gloo group does not authenticate its ranks" in printed
    assert "torch's RPC runs any function that a rank names" in printed


@pytest.mark.slow
def test_torch_does_not_unpickle_data_of_a_guest_outside_of_runs(tmp_path: Path) -> None:
    """A group of our backend that `barnraise run` did not make; groups of other backends are not ours."""
    run_tries(tmp_path / "canary", "by hand")


@pytest.mark.slow
def test_silent_agent_leaves_a_launched_process_without_backend(tmp_path: Path) -> None:
    """Without an answer about guests there is no backend over which a guest could send a pickle."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")},
        "PYTHONPATH": str(Path(barnraise.__file__).parents[1]),
        "BARNRAISE_LAUNCHED": "1",
        "BARNRAISE_RUN": "train-abcd",
        "BARNRAISE_STATE_DIRECTORY": str(tmp_path),
    }
    program = "import torch.distributed as dist; print(hasattr(dist.Backend, 'BARNRAISE'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "False"
    assert "the barnraise backend could not be registered" in done.stderr
