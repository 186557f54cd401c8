"""A hostile script in the sandbox of a guest's machine and of a friend, on hosts of a lab.

It tries everything that a script of others must not do. Each try is refused, and its training works.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse
from barnraise.sandbox.choice import find_sandbox
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, write_folder
from lab import Lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        sys.platform != "linux" or not find_sandbox().is_possible, reason="no sandbox is possible here"
    ),
]

ATTEMPTS = """
import ctypes, glob, json, os, pathlib, signal, socket, subprocess, sys, urllib.request
facts = json.loads(os.environ.get("FACTS") or open("facts.json").read())
state, other = facts["state"], facts["other"]
def attempt(name, action):
    try:
        result = action()
    except Exception as error:
        print(f"ATTEMPT {name}: refused ({type(error).__name__}: {str(error)[:100]})", flush=True)
        return
    print(f"ATTEMPT {name}: " + (f"SUCCEEDED {result!r}"[:200] if result else "refused"), flush=True)
def connect(path):
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    return path
def reach(address, port):
    return socket.create_connection((address, port), 3).getpeername()
def through_proxy(address, port):
    proxy = os.environ["HTTP_PROXY"].removeprefix("http://").split(":")
    link = socket.create_connection((proxy[0], int(proxy[1])), 5)
    link.sendall(f"CONNECT {address}:{port} HTTP/1.1\\r\\n\\r\\n".encode())
    answer = link.recv(1000)
    return answer if b" 200 " in answer else b""
def by_broker(address, port, worker):
    from barnraise.transport.ipc.dial_request import DialRequest, ask_broker, take_connection
    channel = ask_broker(pathlib.Path(os.environ["BARNRAISE_BROKER"]), DialRequest(address, port, worker))
    return take_connection(channel)
attempt("read the key", lambda: pathlib.Path(state, "node.key").read_bytes())
attempt("read the database", lambda: pathlib.Path(state, "cluster.db").read_bytes())
trees = ("/tmp", "/home", "/var", "/run", "/mnt", os.path.dirname(state))
found = [folder for tree in trees for folder, _, files in os.walk(tree) if "node.key" in files]
attempt("find keys", lambda: found)
attempt("open the agent's socket", lambda: connect(f"{state}/listener.sock"))
attempt("signal the agent", lambda: os.kill(facts["agent"], signal.SIGKILL) is None)
def agents():
    lines = [open(path, "rb").read() for path in glob.glob("/proc/[0-9]*/cmdline")]
    return [line for line in lines if b"barnraise.agent\\0" in line]
attempt("see the agent's process", agents)
attempt("write to the state", lambda: pathlib.Path(state, "x").write_text("x") and os.path.exists(other))
attempt("write beside the state", lambda: pathlib.Path(other, "x").write_text("x"))
attempt("write to the system", lambda: pathlib.Path("/usr/bin/x").write_text("x"))
attempt("read the home directory", lambda: pathlib.Path(facts["home"], "diary").read_text())
attempt("read passwords", lambda: pathlib.Path("/etc/shadow").read_text())
attempt("read variables of the machine", lambda: os.environ.get("A_SECRET"))
attempt("new privileges", lambda: ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 0)
attempt("new namespaces", lambda: ctypes.CDLL(None).unshare(0x10000000) == 0)
attempt("mount", lambda: ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0)
attempt("list interfaces", lambda: [name for _, name in socket.if_nameindex() if name != "lo"])
for address in facts["addresses"]:
    attempt(f"reach the agent at {address}", lambda: reach(address, facts["port"]))
    attempt(f"reach the agent at {address} through the proxy", lambda: through_proxy(address, facts["port"]))
    attempt(f"reach the agent at {address} by the broker", lambda: by_broker(address, facts["port"], None))
    attempt(f"reach a web page at {address}", lambda: through_proxy(address, 80))
attempt("reach a service of the machine", lambda: reach("127.0.0.1", facts["service"]))
attempt("reach it through the proxy", lambda: through_proxy("127.0.0.1", facts["service"]))
attempt("reach it by the broker", lambda: by_broker("127.0.0.1", facts["service"], None))
attempt("reach a machine outside of the run", lambda: by_broker(facts["outside"], facts["port"], b"w" * 16))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
attempt("send a datagram", lambda: datagrams.sendto(b"x", (facts["addresses"][0], 52415)))
print("ATTEMPTS ENDED", flush=True)
"""

AGENT_ATTEMPTS = """
from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import PskRequest, ShutdownRequest, StatusRequest, encode
from barnraise.agent_client.run_requests import AcceptRunRequest, RunsRequest
def ask(request):
    with ListenerClient.connect(pathlib.Path(os.environ["BARNRAISE_STATE_DIRECTORY"])) as client:
        return client.ask(encode(request), 30)
requests = [PskRequest("owner"), StatusRequest(), RunsRequest(), ShutdownRequest()]
for request in (*requests, AcceptRunRequest("other", yes=True)):
    attempt(f"ask the agent for {type(request).__name__}", lambda: ask(request))
with ListenerClient.connect(pathlib.Path(os.environ["BARNRAISE_STATE_DIRECTORY"])) as client:
    attempt("register for another run", lambda: client.register("other", 1))
with ListenerClient.connect(pathlib.Path(os.environ["BARNRAISE_STATE_DIRECTORY"])) as client:
    attempt("get the cluster's secret", lambda: client.register(os.environ["BARNRAISE_RUN"], 1).secret)
"""

TRAINING = """
import torch
import torch.distributed as dist
dist.init_process_group("barnraise")
total = torch.ones(3)
dist.all_reduce(total)
print("SUM", total.tolist(), flush=True)
"""

HUB_TRAINING = """
import torch
import barnraise
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(512, 8)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = barnraise.init(seed=1)
model, optimizer, batches = run.prepare(model, optimizer, DataLoader(TensorDataset(x), batch_size=64))
for epoch in run.epochs(100000):
    for batch in batches:
        for (a,) in batch:
            loss = (model(a) - a).square().mean()
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    if run.history:
        print("TRAINED", run.step, flush=True)
"""

SERVICE = "import http.server as web; web.test(web.SimpleHTTPRequestHandler, port=8080, bind='127.0.0.1')"


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """An owner, a guest, and another owner that takes no part in the run."""
    with Lab(hosts=3) as lab, Machines(lab.hosts) as formed:
        formed.extra |= {"A_SECRET": "of the machine", "HOME": str(formed.state(0).parent / "home")}
        home = Path(formed.extra["HOME"])
        home.mkdir()
        (home / "diary").write_text("private")
        (formed.state(0).parent / "other").mkdir()
        for place in range(3):
            formed.launch(place)
        for place in range(3):
            formed.await_answer(place)
            formed.rename(place, f"h{place}")
        formed.pair(0, 2)
        formed.pair(0, 1, guest=True)
        formed.until(lambda: formed.agree(range(3)), 90.0, "all are here")
        yield formed


def facts_for(machines: Machines, place: int, service: int) -> str:
    directory = machines.state(place).parent
    return json.dumps(
        {
            "state": str(machines.state(place)),
            "other": str(directory / "other"),
            "home": machines.extra["HOME"],
            "agent": machines.process(place).pid,
            "addresses": [host.address for host in machines.hosts[:2]],
            "outside": machines.hosts[2].address,
            "port": int(machines.environment(place).get("BARNRAISE_NETWORK_PORT", "52416")),
            "service": service,
        }
    )


def judge(printed: str, min_attempts: int) -> None:
    attempts = re.findall(r"ATTEMPT (.*)", printed)
    succeeded = [attempt for attempt in attempts if "SUCCEEDED" in attempt]
    assert not succeeded, "\n".join(succeeded)
    assert len(attempts) >= min_attempts, printed
    assert "ATTEMPTS ENDED" in printed


def test_hostile_run_on_a_guest_is_confined_and_trains(machines: Machines, tmp_path: Path) -> None:
    """An owner's script on a guest's machine tries keys, sockets, processes, files and networks."""
    line = CommandLine(machines)
    service = machines.hosts[1].start([sys.executable, "-c", SERVICE])
    folder = tmp_path / "run"
    guarded = f"import os\nif os.environ['RANK'] == '1':\n{_indented(ATTEMPTS + AGENT_ATTEMPTS)}\n{TRAINING}"
    write_folder(folder, guarded)
    facts = f"FACTS={facts_for(machines, 1, 8080)}"
    options = ("--on", "h0,h1", "--engine", "barnraise", "--all", "--set", facts)
    started = line.start(0, "run", *options, "train.py", folder=folder)

    def waits() -> bool:
        runs = machines.ask(1, RunsRequest(), RunsResponse).runs
        return bool(runs) and "does not wait" not in line.run(1, "accept", runs[-1].run, "--json").stdout

    machines.until(waits, 120.0, "the guest is asked")
    run = machines.ask(1, RunsRequest(), RunsResponse).runs[-1].run
    machines.until(lambda: "files" in line.run(1, "accept", run, "--json").stdout, 120.0, "it is offered")
    accepted = line.run(1, "accept", run, "--yes")
    assert "A sandbox confines the script" in accepted.stdout.replace("\n             ", " "), accepted.stdout
    code = started.wait(300)
    printed = started.output()
    assert code == 0, printed
    judge(printed, 30)
    assert printed.count("SUM [2.0, 2.0, 2.0]") == 2, printed
    assert not list((machines.state(1).parent / "other").iterdir())
    machines.status(1)  # its agent still answers
    service.kill()


def test_hostile_script_of_a_hub_is_confined_at_a_friend_and_trains(
    machines: Machines, tmp_path: Path
) -> None:
    """A hub's script on the machine of an owner tries that owner's keys, agent, files and networks."""
    line = CommandLine(machines)
    service = machines.hosts[2].start([sys.executable, "-c", SERVICE])
    folder = tmp_path / "hub"
    guarded = f"import os\nif os.environ.get('BARNRAISE_BROKER'):\n{_indented(ATTEMPTS)}\n{HUB_TRAINING}"
    write_folder(folder, guarded, extra={"facts.json": facts_for(machines, 2, 8080)})
    address = f"https://{machines.hosts[0].address}:52480"
    words = ("hub", "up", "--name", "hostile", "--address", address, "--no-train", "--round", "2s")
    hub = line.start(0, *words, "train.py", folder=folder)
    machines.until(lambda: "barnraise-invite:" in hub.output(), 200.0, "the hub prints an invite")
    invite = re.search(r"barnraise-invite:\S+", hub.output())
    assert invite is not None
    friend = line.start(2, "join", "--invite", invite[0], "--yes", "--name", "friend", folder=tmp_path)
    machines.until(lambda: "TRAINED" in friend.output(), 240.0, f"the friend trains: {friend!r}")
    printed = friend.output()
    judge(printed, 25)
    assert "A sandbox confines the script" in printed
    machines.status(2)  # its agent still answers
    assert not list((machines.state(2).parent / "other").iterdir())
    for process in (friend, hub):
        process.signal(signal.SIGINT)
        process.wait(60)
    assert not list((machines.state(2) / "hubs").glob("*")), "everything of the script is gone"
    service.kill()


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
