"""Attacks by another user of the same computer: on the files and the socket of an agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from barnraise.identity import NodeKey
from barnraise.identity.trust import TrustLog, encode_entry
from barnraise.membership.consensus.paxos import founded
from barnraise.membership.storage import MembershipStorage
from barnraise.membership.view import first
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.cluster import AttackedCluster

_LOCAL: Final = "other local user"
_USER = 65534
_LIMIT_S = 120.0
# The interpreter may be in a folder of root, so it drops its rights only after its start.
_OPEN_FILES = """
import json, os, socket, sys
state, user = sys.argv[1], int(sys.argv[2])
os.setgroups([])
os.setgid(user)
os.setuid(user)
tried, reached = [], []

def attempt(name, call):
    tried.append(name)
    try:
        call()
    except OSError:
        return
    reached.append(name)

for name in ("node.key", "cluster.db", "audit.log"):
    path = os.path.join(state, name)
    attempt("read " + name, lambda: open(path, "rb"))
    attempt("write " + name, lambda: open(path, "r+b"))
attempt("list", lambda: os.listdir(state))
attempt("create", lambda: open(os.path.join(state, "planted"), "x"))
attempt("connect", lambda: socket.socket(socket.AF_UNIX).connect(os.path.join(state, "listener.sock")))
print(json.dumps([tried, reached]))
"""


@attack(
    "local-user-opens-state",
    _LOCAL,
    "reads or changes the agent's key, database and audit log, and connects to its socket",
    AttackedCluster,
)
def open_state(cluster: AttackedCluster) -> str:
    state = cluster.machines.state(0)
    cluster.directory.chmod(0o711)  # as a home directory: the path to the state is open to all
    try:
        with cluster.unchanged():
            command = [sys.executable, "-P", "-c", _OPEN_FILES, str(state), str(_USER)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    finally:
        cluster.directory.chmod(0o700)
    tried, reached = json.loads(done.stdout)
    assert len(tried) == 9, "not all was tried"
    assert reached == [], f"reached: {', '.join(reached)}"
    return "the system denied each attempt"


def _start_with(cluster: AttackedCluster, state: Path) -> str:
    """Start an agent with this state directory, and return its last words."""
    environment = cluster.machines.environment(0) | {"BARNRAISE_STATE_DIRECTORY": str(state)}
    command = [sys.executable, "-P", "-m", "barnraise.agent"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 1, f"the agent started: {done.stdout}"
    return done.stderr


@attack(
    "local-user-plants-state",
    _LOCAL,
    "makes the state directory first, with a trust log in which it is the owner",
    AttackedCluster,
)
def plant_state(cluster: AttackedCluster) -> str:
    state = Path(cluster.new_path())
    state.mkdir(mode=0o700)
    key = NodeKey.generate()
    log = TrustLog.found(key, "mallory")
    storage = MembershipStorage(state)
    record = founded(first(key.id.raw, bytes(16), len(log)))
    storage.replace_cluster(record, tuple(map(encode_entry, log.entries)))
    storage.close()
    for path in (*state.iterdir(), state):
        os.chown(path, _USER, _USER)
    planted = sorted(os.listdir(state))
    assert "belongs to another user" in _start_with(cluster, state)
    assert sorted(os.listdir(state)) == planted, "the agent put its key there"
    return "the agent did not start, and wrote no key"


@attack(
    "local-user-replaces-database",
    _LOCAL,
    "waits for a state directory that all users may write to",
    AttackedCluster,
)
def replace_database(cluster: AttackedCluster) -> str:
    state = Path(cluster.new_path())
    state.mkdir()
    state.chmod(0o777)
    assert "other users may write" in _start_with(cluster, state)
    assert os.listdir(state) == [], "the agent put its key there"
    return "the agent did not start, and wrote no key"
