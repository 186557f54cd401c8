"""Places that confined workers reach, data that they see, and their sandbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from barnraise.agent.runs.confinement import RunSandbox, check_data_path, make_broker
from barnraise.agent.supervisor.messages import WorkerLaunch
from barnraise.core.errors import RunError
from barnraise.identity import NodeId
from barnraise.sandbox.choice import find_sandbox
from barnraise.transport.ipc.dial_broker import choose_addresses
from barnraise.transport.ipc.dial_request import DialRequest
from barnraise.transport.listener.preface import ROUTE_WORKER, parse
from tests.unit.runs.control.test_lifecycle import A, B, order

WORKER = b"w" * 16


class Cluster:
    """An agent that knows a machine of the run and another one."""

    secret = b"s" * 32
    port = 52416

    def __init__(self) -> None:
        self.log = self.listener = self.connections = self

    def own_addresses(self) -> list[str]:
        return ["192.168.1.2"]

    def proved_places(self, node: NodeId) -> frozenset[tuple[str, int]]:
        addresses = {B: "192.168.1.3", b"\xee" * 32: "192.168.1.4"}
        return frozenset({(addresses[node.raw], 52416)} if node.raw in addresses else ())


def test_broker_of_run_reaches_machines_of_the_run_only(tmp_path: Path) -> None:
    """Tries the agent of a machine that belongs to the cluster, but not to the run."""
    context: Any = Cluster()
    spec = order()
    assert set(spec.nodes) >= {A, B}
    broker = make_broker(context, spec, tmp_path)
    rules, preface = broker._rules(), broker._preface
    for address in ("192.168.1.2", "192.168.1.3"):
        assert choose_addresses(DialRequest(address, 52416, WORKER), [address], rules)[0] == (address,)
    for address in ("192.168.1.4", "192.168.1.1", "127.0.0.1"):
        assert choose_addresses(DialRequest(address, 52416, WORKER), [address], rules)[0] == ()
    assert preface is not None
    sent = parse(preface(WORKER, False), lambda route, target: Cluster.secret)
    assert (sent.route, sent.target, sent.plaintext) == (ROUTE_WORKER, WORKER, False)


def test_check_data_path_outside_of_listed_directories_raises(tmp_path: Path) -> None:
    """Tries the home directory, a link that leads there, and a name that only begins alike."""
    data, home = tmp_path / "data", tmp_path / "home"
    for directory in (data, home, tmp_path / "data2"):
        directory.mkdir()
    (data / "link").symlink_to(home)
    check_data_path("mnist", data, [str(data)])
    check_data_path("mnist", data / "mnist", [str(data)])
    for path in (home, data / "link", data / ".." / "home", tmp_path / "data2"):
        with pytest.raises(RunError, match="does not show to runs of others") as raised:
            check_data_path("mnist", path, [str(data)])
        assert "data_paths" in raised.value.hint
    with pytest.raises(RunError):
        check_data_path("mnist", data, [])


@pytest.mark.skipif(
    sys.platform != "linux" or not find_sandbox().is_possible, reason="no sandbox is possible here"
)
def test_wrapped_worker_sees_its_interface_and_no_other_state(tmp_path: Path) -> None:
    state = tmp_path / "state"
    home, interface = state / "runs" / "train-abcd", state / "ipc" / "ab12cd"
    for directory in (home / "folder", home / "logs", interface, tmp_path / "set"):
        directory.mkdir(parents=True)
    (state / "node.key").write_text("a key")
    (tmp_path / "set" / "one").write_text("1")
    script = (
        "import os, sys\n"
        "state, data = sys.argv[1:]\n"
        "print(sorted(os.listdir(state)), sorted(os.listdir(f'{state}/runs/train-abcd')), os.listdir(data))\n"
        "open(f'{state}/ipc/ab12cd/openssl.cnf', 'w')\n"
        "print(os.environ['RANK'], os.environ['BARNRAISE_BROKER'])\n"
    )
    worker = WorkerLaunch(
        0,
        0,
        (sys.executable, "-c", script, str(state), str(tmp_path / "set")),
        str(home / "folder"),
        {"RANK": "0"},
        "",
    )
    box = RunSandbox(find_sandbox(), home, state=state, interface=interface)
    wrapped = box.wrap(worker, 3, Path(sys.executable), (str(tmp_path / "set"),))
    done = subprocess.run(
        wrapped.command, env=wrapped.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "['ipc', 'runs'] ['folder', 'sandbox'] ['one']"
    assert second == f"0 {interface}/dial.sock"
