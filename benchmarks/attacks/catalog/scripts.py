"""Attacks by the script of a hub that an owner's machine joined: it tries all that its user could do.

A hub on another host hands out the script. The person on ``h1`` types `barnraise join --invite`. The script
prints what it could do; files, processes and agents of the machine are looked at from outside as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import psutil

from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.cluster import PORT
from benchmarks.attacks.scenes.runs import RunCluster

_SCRIPT: Final = "friend's script"
_VICTIM = 1  # the machine of the person that joins; it is an owner of the cluster
_HUB_PORT = 52480
_JOIN_S = 200.0
_AT_THE_HUB = """\
import os, sys, time
if "AT_THE_HUB" in os.environ:  # the hub's owner only makes the first model
    import torch
    import barnraise
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.zeros(64, 4), torch.zeros(64, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    run = barnraise.init(seed=1)
    model, optimizer, batches = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(100000):
        for batch in batches:
            for a, b in batch:
                torch.nn.functional.mse_loss(model(a), b).backward()
                time.sleep(1.0)
                optimizer.step()
                optimizer.zero_grad()
    sys.exit(0)
"""
_HOSTILE = """\
import ctypes, glob, os, pathlib, signal, socket, urllib.parse

def attempt(name, action):
    try:
        result = "SUCCEEDED" if action() else "refused"
    except Exception as error:
        result = "refused " + type(error).__name__
    print("TRIED", name, result, action.__code__.co_names, flush=True)

def dial(host, port):
    return lambda: socket.create_connection((host, port), 3)

def through_proxy(host, port):
    proxy = urllib.parse.urlsplit(os.environ["https_proxy"])
    with socket.create_connection((proxy.hostname, proxy.port), 3) as line:
        line.sendall(f"CONNECT {host}:{port} HTTP/1.1\\r\\n\\r\\n".encode())
        return line.recv(100).split()[1] == b"200"

state = pathlib.Path(STATE)
attempt("keys", lambda: (state / "node.key").read_bytes())
attempt("keys", lambda: (state / "cluster.db").read_bytes())
attempt("keys", lambda: [found for found in state.rglob("*") if found.suffix in (".key", ".db", ".log")])
attempt("keys", lambda: pathlib.Path(DIARY).read_text())
attempt("keys", lambda: len(glob.glob("/proc/[0-9]*/environ")) > 10)
for path in SOCKETS:
    attempt("agent", lambda: socket.socket(socket.AF_UNIX).connect(path) is None)
attempt("agent", lambda: os.kill(AGENT, 0) is None)
attempt("agent", lambda: b"barnraise.agent" in open(f"/proc/{AGENT}/cmdline", "rb").read())
attempt("agent", lambda: os.kill(AGENT, signal.SIGTERM) is None)
for path in CANARIES:
    attempt("files", lambda: pathlib.Path(path).write_text("x") and path.startswith(("/usr", "/etc")))
for host in HOSTS:
    attempt("network", dial(host, PORT))
    attempt("network", lambda: through_proxy(host, PORT))
attempt("network", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (HOSTS[0], 52415)))
own = open("/proc/self/status").read()
attempt("rights", lambda: int(own.partition("CapEff:")[2].split()[0], 16))
attempt("rights", lambda: ctypes.CDLL(None).unshare(0x10000000) == 0)
attempt("rights", lambda: ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0)
attempt("rights", lambda: own.partition("NoNewPrivs:")[2].split()[0] == "0")
print("TRIED all", flush=True)
"""
_reports: WeakKeyDictionary[RunCluster, list[tuple[str, str]]] = WeakKeyDictionary()


def _canaries(cluster: RunCluster) -> list[Path]:
    state = cluster.machines.state(_VICTIM)
    name = f"canary-{cluster.directory.name}"  # of this scene alone
    return [
        state / name,
        cluster.directory / name,
        Path.home() / name,
        Path("/tmp", name),
        Path("/usr/lib", name),
    ]


def _report(cluster: RunCluster) -> list[tuple[str, str]]:
    """Return what the script tried and how each attempt ended; it runs once for all attacks."""
    if cluster not in _reports:
        _reports[cluster] = _join_hostile_hub(cluster)
    return _reports[cluster]


def _join_hostile_hub(cluster: RunCluster) -> list[tuple[str, str]]:
    state = cluster.machines.state(_VICTIM)
    diary = Path.home() / f"diary-{cluster.directory.name}"
    facts = {
        "STATE": str(state),
        "SOCKETS": [str(path) for path in state.rglob("*.sock")],
        "AGENT": cluster.machines.process(_VICTIM).pid,
        "CANARIES": [str(path) for path in _canaries(cluster)],
        "HOSTS": [*cluster.addresses, "127.0.0.1"],
        "PORT": PORT,
        "DIARY": str(diary),
    }
    folder, hub_state = cluster.new_folder(), cluster.new_folder()
    folder.mkdir()
    hub_state.mkdir(mode=0o700)
    lines = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
    (folder / "train.py").write_text(lines + _AT_THE_HUB + _HOSTILE)
    environment = {
        **cluster.machines.environment(0),
        "BARNRAISE_STATE_DIRECTORY": str(hub_state),
        "AT_THE_HUB": "1",
    }
    address = f"https://{cluster.outside.address}:{_HUB_PORT}"
    words = ("hub", "up", "--name", "hostile", "--address", address, "--no-train", "train.py")
    hub = cluster.outside.start(cluster.line.command(*words), env=environment, cwd=folder)
    try:
        diary.write_text("private")
        cluster.machines.until(lambda: "barnraise-invite:" in hub.output(), 60.0, "the hub prints an invite")
        invite = re.search(r"barnraise-invite:\S+", hub.output())
        assert invite is not None
        typed = ("join", "--invite", invite[0], "--yes", "--name", "friend")
        done = cluster.line.run(_VICTIM, *typed, timeout=_JOIN_S)
    finally:
        hub.kill()
        diary.unlink(missing_ok=True)
    printed = done.stdout + done.stderr
    assert "TRIED all" in printed, f"the script did not run: {printed[-300:]}"
    return re.findall(r"TRIED (\w+) (.+)", printed)


def _judge(cluster: RunCluster, kind: str) -> str:
    with cluster.unchanged(lines=60):
        results = [result for name, result in _report(cluster) if name == kind]
        assert results, "nothing was tried"
        succeeded = [result for result in results if result.startswith("SUCCEEDED")]
        assert not succeeded, f"{len(succeeded)} of {len(results)} attempts succeeded: {succeeded}"
    left = [path for path in _canaries(cluster) if path.exists()]
    assert not left, f"it wrote {left}"
    assert psutil.pid_exists(cluster.machines.process(_VICTIM).pid), "the agent has ended"
    return f"{len(results)} attempts, all refused"


@attack(
    "script-reads-keys",
    _SCRIPT,
    "reads the node key, the database, the log, a diary in the home, other processes",
    RunCluster,
)
def read_keys(cluster: RunCluster) -> str:
    return _judge(cluster, "keys")


@attack(
    "script-commands-agent",
    _SCRIPT,
    "opens the agent's sockets, and sees and signals its process",
    RunCluster,
)
def command_agent(cluster: RunCluster) -> str:
    return _judge(cluster, "agent")


@attack(
    "script-writes-outside", _SCRIPT, "writes to the state, the home and the system's directories", RunCluster
)
def write_outside(cluster: RunCluster) -> str:
    return _judge(cluster, "files")


@attack(
    "script-reaches-network",
    _SCRIPT,
    "dials agents of the cluster and this machine, also through the proxy",
    RunCluster,
)
def reach_network(cluster: RunCluster) -> str:
    return _judge(cluster, "network")


@attack("script-gains-rights", _SCRIPT, "looks for capabilities, makes namespaces, mounts", RunCluster)
def gain_rights(cluster: RunCluster) -> str:
    return _judge(cluster, "rights")
