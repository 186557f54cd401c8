"""The pickle guard rejects unpickling in a group with a guest, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import barnraise
from barnraise.agent_client.run_options import RunProgram
from barnraise.core.errors import ConfigError
from barnraise.identity import NodeKey
from barnraise.runs.participants import VARIABLE, Participants
from barnraise.runs.record import RunRecord, RunSpec, WorkerSlot
from barnraise.runs.worker_environment import worker_environment

OWNERS = (b"\1" * 32, b"\2" * 32)
GUEST = b"\7" * 32
COMPANY = Participants(OWNERS[0].hex(), tuple(node.hex() for node in OWNERS), {GUEST.hex(): "friend"})


def test_unknown_node_is_not_an_owner() -> None:
    assert COMPANY.not_owners([OWNERS[1]]) == ()
    assert COMPANY.not_owners([OWNERS[1], GUEST]) == ("friend",)
    assert COMPANY.not_owners([b"\5" * 32]) == ("machine 05050505",), "a guest of other runs"
    assert COMPANY.not_owners([b""]) == ("a machine without a certificate",), "in plaintext"
    guests_own = Participants(GUEST.hex(), COMPANY.owners, COMPANY.guests)
    assert guests_own.not_owners([OWNERS[0]]) == ("friend",), "all ranks refuse alike"


def test_worker_environment_names_guests() -> None:
    program = RunProgram(command=("t.py",), folder=b"")
    order = RunSpec(run="r", by=OWNERS[0], at=0, program=program, nodes=(*OWNERS, GUEST))
    key = NodeKey.generate()
    record = RunRecord(order=b"", signature=key.sign(b""), slots=(WorkerSlot(OWNERS[0], 0, "cpu"),))

    def environment(guests: dict[bytes, str]) -> dict[str, str]:
        places = {"state_directory": "s", "local_store": "", "checkpoints": ""}
        return worker_environment({}, order, record, 0, start=1, data={}, cores=1, guests=guests, **places)

    assert Participants.read(environment({GUEST: "friend"})) == COMPANY
    assert Participants.read(environment({})) is None
    with pytest.raises(ConfigError, match="does not name the participants"):
        Participants.read({VARIABLE: "friend"})


# In a process of its own: torch is changed there for good, by its own way of loading the backend.
TRIES = """
import io, pickle, sys
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, rpc
from barnraise.core.errors import UntrustedPickle

class Group(dist.ProcessGroup):
    def __init__(self, world, **known):
        super().__init__(0, world)
        vars(self).update(known)
        self.getBackendName = lambda: "gloo"

class Bomb:
    def __reduce__(self):
        return open, (sys.argv[1], "w")

owner, guest = b"\\2" * 32, b"\\7" * 32
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
print(refused(dist.all_gather_object, [None, None], 1, group=Group(2)))
print(refused(rpc.init_rpc, "me", rank=0, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method="file://" + sys.argv[1] + ".store")))

plain = torch.frombuffer(bytearray(pickle.dumps("word")), dtype=torch.uint8)
for clean in (Group(2, nodes=(owner,)), Group(1)):
    assert distributed_c10d._tensor_to_object(plain, plain.numel(), clean) == "word"

from torch.distributed.checkpoint._pg_transport import PGTransport
mixed = Group(2, nodes=(guest,))
refused(PGTransport(mixed, None, torch.device("cpu")).recv_checkpoint, 1)
if sys.argv[2:]:
    from torch.distributed.optim import zero_redundancy_optimizer as zero
    refused(zero._broadcast_object, None, 1, mixed)
    refused(zero._broadcast_object, None, 1, group=mixed)
try:
    dist.all_gather_object([None], 1)
except ValueError as error:
    print("torch says:", error)
"""


@pytest.mark.slow
def test_torch_does_not_unpickle_data_of_a_guest(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
    environment = {**kept, "PYTHONPATH": str(Path(barnraise.__file__).parents[1]), VARIABLE: COMPANY.encode()}
    canary = tmp_path / "canary"
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRIES, str(canary), "all"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not canary.exists(), "it was executed"
    assert "friend is a guest in this group" in done.stdout
    assert "-> Send tensors instead (all_gather, or run.gather of a session)" in done.stdout
    assert "a gloo group does not authenticate its ranks" in done.stdout
    assert "torch's RPC runs any function that a rank names" in done.stdout
    assert "torch says: Default process group has not been initialized" in done.stdout
