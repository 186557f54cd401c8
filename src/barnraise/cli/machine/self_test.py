"""``barnraise self-test``: three nodes on this machine pair, train, lose a worker and get it back.

It needs no root and no other machine, touches nothing of yours, and says in words what it proved.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from barnraise.agent_client.bootstrap import child_environment
from barnraise.agent_client.client import ListenerClient
from barnraise.agent_client.cluster_requests import (
    AgentRequest,
    AgentResponse,
    JoinClusterRequest,
    OfferResponse,
    PairRequest,
    RenameRequest,
    RequestDone,
    StatusRequest,
    StatusResponse,
    decode_response,
    encode,
)
from barnraise.agent_client.run_requests import RunRequest
from barnraise.core.command import runner
from barnraise.core.errors import AgentError, BarnraiseError, RunError, TorchMissing

NAMES = ("ada", "ben", "cleo")
_PATIENCE_S = 120.0
_STEPS_BEFORE = 6
_PROGRAM = """\
import time, torch, barnraise
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(128, 10, dtype=torch.float64)
y = x[:, :2].sum(1, keepdim=True).tanh()
model = torch.nn.Sequential(
    torch.nn.Linear(10, 16, dtype=torch.float64), torch.nn.Tanh(), torch.nn.Dropout(0.1),
    torch.nn.Linear(16, 1, dtype=torch.float64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
run = barnraise.init(seed=1)
model, optimizer, batches = run.prepare(model, optimizer, loader)
for epoch in run.epochs(20):
    for batch in batches:
        for inputs, labels in batch:
            torch.nn.functional.mse_loss(model(inputs), labels).backward()
            time.sleep(PAUSE)
            optimizer.step(); optimizer.zero_grad()
print("final", run.done, *(repr(one.sum().item()) for one in model.parameters()))
"""

T = TypeVar("T", bound=AgentResponse)


class SelfTestNode:
    """One agent of the test, with a state directory and a port of its own."""

    def __init__(self, name: str, workspace: Path, discovery: int) -> None:
        self.name = name
        self.state = workspace / name
        self.state.mkdir(mode=0o700)
        self.port = _free_port()
        kept = {key: value for key, value in child_environment().items() if not key.startswith("BARNRAISE_")}
        self.environment = {
            **kept,
            "BARNRAISE_CONFIG": str(workspace / "config.toml"),
            "BARNRAISE_STATE_DIRECTORY": str(self.state),
            "BARNRAISE_NETWORK_PORT": str(self.port),
            "BARNRAISE_NETWORK_DISCOVERY_PORT": str(discovery),
            "BARNRAISE_NETWORK_ADDRESSES": "127.0.0.1",
        }
        log = open(workspace / f"{name}.log", "wb")  # noqa: SIM115  # the process owns it
        command = [sys.executable, "-P", "-m", "barnraise.agent"]
        self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        log.close()

    def ask(self, question: AgentRequest | RunRequest, expected: type[T], timeout_s: float = 60.0) -> T:
        with ListenerClient.connect(self.state) as client:
            response = decode_response(client.ask(encode(question), timeout_s))
        if not isinstance(response, expected):
            raise AgentError(f"the agent answered {type(response).__name__}")
        return response

    def answers(self) -> bool:
        try:
            return bool(self.ask(StatusRequest(), StatusResponse, 5.0).nodes)
        except BarnraiseError:
            return False

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run() -> int:
    """Exit code 0 if everything was proved."""
    _check_torch()
    click.echo("Three test machines are simulated here; they pair and train for about a minute.")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="by-self-", ignore_cleanup_errors=True) as name:
        workspace = Path(name)
        (workspace / "config.toml").touch()
        discovery = _free_port()
        nodes = [SelfTestNode(node_name, workspace, discovery) for node_name in NAMES]
        try:
            _prove(nodes, workspace)
        finally:
            for node in nodes:
                node.end()
    click.echo(f"Everything above was proved on this machine in {time.monotonic() - begin:.0f} s.")
    return 0


def _prove(nodes: list[SelfTestNode], workspace: Path) -> None:
    first = nodes[0]
    for node in nodes:
        _until(node.answers, f"the agent of {node.name} answers")
        node.ask(RenameRequest(node.name), RequestDone)
    for node in nodes[1:]:
        code = first.ask(PairRequest(), OfferResponse).code
        node.ask(JoinClusterRequest(code, at=f"127.0.0.1:{first.port}"), RequestDone)
    _until(lambda: _members(first) == 3, "all three agree")
    click.echo("ok  three machines found and trust each other by one-time codes, over encrypted links")
    trace = workspace / "trace"
    running = _start(first, workspace, trace)
    try:
        _until(lambda: _last(trace)[0] >= _STEPS_BEFORE and _last(trace)[1] == 3, "all three train")
        click.echo(
            f"ok  one command sent the program to all three; they train together (step {_last(trace)[0]})"
        )
        victim = _pid_of_rank(trace, 2)
        step = _last(trace)[0]
        os.kill(victim, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        killed = time.monotonic()
        _until(lambda: _last(trace)[0] > step + 1, "the others continue")
        took = time.monotonic() - killed
        click.echo(f"ok  one worker was killed; the others committed the next step after {took:.1f} s")
        _until(lambda: _last(trace)[1] == 3 and _last(trace)[0] > step + 2, "it is back")
        click.echo(f"ok  it was started again, received the state and joined at step {_last(trace)[0]}")
        if running.wait(_PATIENCE_S) != 0:
            raise RunError(f"the run failed:\n{_words(workspace)}", hint="Report this with the lines above.")
    finally:
        running.kill()
    _check_trace(trace)
    click.echo("ok  after every step all machines held the same bits, and no sample counted twice")
    _compare(first, workspace)


def _start(node: SelfTestNode, workspace: Path, trace: Path) -> subprocess.Popen[bytes]:
    folder = workspace / "project"
    folder.mkdir()
    (folder / "train.py").write_text(f"PAUSE = 0.05\n{_PROGRAM}")
    words = ["run", "--set", f"BARNRAISE_TRACE_COMMITS={trace}", "train.py"]
    with open(workspace / "run.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "barnraise.cli.main", *words],
            cwd=folder,
            env=node.environment,
            stdout=log,
            stderr=log,
        )


def _compare(node: SelfTestNode, workspace: Path) -> None:
    """Run the same steps on one machine alone, and compare the results."""
    trained = re.search(r"final (\d+) (.*)", _words(workspace))
    if trained is None:
        raise RunError("the run printed no result", hint="Report this with the agents' logs.")
    script = workspace / "alone.py"
    script.write_text(f"PAUSE = 0.0\n{_PROGRAM}")
    environment = {key: value for key, value in node.environment.items() if not key.startswith("BARNRAISE_")}
    done = runner(120.0, environment)([sys.executable, str(script)])
    alone = re.search(r"final (\d+) (.*)", done.stdout)
    if alone is None or alone[1] != trained[1]:
        raise RunError(f"the same program alone failed:\n{done.stderr}", hint="Report this.")
    pairs = zip(trained[2].split(), alone[2].split(), strict=True)
    apart = max(abs(float(trained_value) - float(alone_value)) for trained_value, alone_value in pairs)
    if apart > 1e-9:
        raise RunError(f"the result differs from that of one machine by {apart:g}", hint="Report this.")
    click.echo(
        f"ok  after {trained[1]} steps the model is that of one machine alone (difference {apart:.0e})"
    )


def _check_trace(trace: Path) -> None:
    seen: dict[int, str] = {}
    units: dict[int, list[str]] = {}
    for line in trace.read_text().splitlines():
        head, _, computed = line.partition("[")
        _, step, _, _, _, digest, *_ = head.split()
        if seen.setdefault(int(step), digest) != digest:
            raise RunError(f"machines held different states after step {step}", hint="Report this.")
        units.setdefault(int(step), []).extend(unit for unit in computed.strip(" ]").split(", ") if unit)
    if any(len(step_units) != len(set(step_units)) for step_units in units.values()):
        raise RunError("a micro-batch counted twice", hint="Report this.")


def _last(trace: Path) -> tuple[int, int]:
    """Return the newest step and the number of members of its group."""
    try:
        words = trace.read_text().splitlines()[-1].split()
        return int(words[1]), int(words[4])
    except (OSError, IndexError, ValueError):
        return 0, 0


def _pid_of_rank(trace: Path, rank: int) -> int:
    for line in reversed(trace.read_text().splitlines()):
        words = line.split()
        if int(words[3]) == rank:
            return int(words[6])
    raise RunError(f"no worker has rank {rank}", hint="Try again.")


def _members(node: SelfTestNode) -> int:
    return sum(row.seniority is not None for row in node.ask(StatusRequest(), StatusResponse, 5.0).nodes)


def _until(truth: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not truth():
        if time.monotonic() > deadline:
            raise RunError(
                f"waited {_PATIENCE_S:g} s without success until {what}", hint="Run `barnraise doctor`."
            )
        time.sleep(0.05)


def _words(workspace: Path) -> str:
    return (workspace / "run.log").read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _check_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise TorchMissing("torch is not installed, and the test trains a small model")
