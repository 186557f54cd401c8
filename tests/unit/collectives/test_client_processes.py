"""The backend in real processes, each a group of one: exit, fork and loss of the communication process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.hub.process import free_port
from tests.arch.source_tree import ROOT, SOURCE

_PRELUDE = """
import gc, os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from barnraise import collectives
from barnraise.collectives.client import current_comm_process
torch.set_num_threads(1)
group = collectives.create_group(dist.HashStore(), 0, 1, 60)
comm_process = current_comm_process().pid
print(comm_process, flush=True)
def pending():
    return group.recv_anysource([torch.zeros(3)], 7)
def works(chosen=None):
    tensor = torch.arange(5.0)
    (chosen or group).allreduce([tensor]).wait()
    return tensor.tolist() == [0, 1, 2, 3, 4]
"""

pytestmark = pytest.mark.slow
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A machine of its own: state, settings and port."""
    directory = tmp_path_factory.mktemp("b")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")},
        "BARNRAISE_CONFIG": str(_touch(directory / "config.toml")),
        "BARNRAISE_STATE_DIRECTORY": str(directory),
        "BARNRAISE_NETWORK_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }


def _touch(path: Path) -> Path:
    path.touch()
    return path


def _start(environment: dict[str, str], body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + body],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(environment: dict[str, str], body: str) -> tuple[str, str, int]:
    process = _start(environment, body)
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
        process.wait()
    return out, err, process.returncode


def _gone(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_exit_with_open_groups_prints_nothing(environment: dict[str, str]) -> None:
    out, err, code = _run(
        environment,
        """
work = pending()
future = work.get_future().then(lambda f: print("never", f.value()))
second = collectives.create_group(dist.HashStore(), 0, 1, 60)
assert works() and works(second)
assert not work.is_completed() and work.exception() is None
""",
    )
    assert (err, code) == ("", 0)
    assert _gone(int(out.split()[0]))
    assert "never" not in out


def test_killed_comm_process_fails_pending_works_and_is_restarted(environment: dict[str, str]) -> None:
    out, err, code = _run(
        environment,
        """
work = pending()
future = work.get_future()
os.kill(comm_process, signal.SIGKILL)
for wait in (work.wait, future.wait, group.allreduce([torch.ones(2)]).wait):
    try:
        wait()
        print("no error")
    except collectives.CommProcessLost:
        print("lost")
    except RuntimeError as error:  # how torch's futures pass on what a callback raised
        print("lost" if "comm-process-lost" in str(error) else error)
assert work.is_completed() and not work.is_success()
assert isinstance(work.exception(), collectives.CommProcessLost)
assert collectives.statistics()["pid"] is None
again = collectives.create_group(dist.HashStore(), 0, 1, 60)
assert works(again) and collectives.statistics()["pid"] not in (None, comm_process)
print("right")
""",
    )
    assert err == ""
    assert out.split()[1:] == ["lost", "lost", "lost", "right"]
    assert code == 0


def test_configured_timeout_holds_where_the_script_gives_none(environment: dict[str, str]) -> None:
    out, err, code = _run(
        environment | {"BARNRAISE_COLLECTIVES_TIMEOUT_S": "1.5"},
        """
dist.init_process_group("barnraise", store=dist.HashStore(), rank=0, world_size=1)
def seconds(**options):
    chosen = dist.new_group([0], **options)
    started = time.monotonic()
    try:
        dist.recv(torch.zeros(3), tag=7, group=chosen)
    except collectives.OperationTimeout:
        return time.monotonic() - started
print(1.4 < seconds() < 60, 1.4 < seconds(timeout=timedelta(minutes=30)) < 60)
print(seconds(timeout=timedelta(seconds=3)) > 2.9)
dist.destroy_process_group()
""",
    )
    assert err == ""
    assert out.split()[1:] == ["True"] * 3
    assert code == 0


def test_future_callback_may_wait_for_another_operation(environment: dict[str, str]) -> None:
    out, err, code = _run(
        environment,
        """
def chained(future):
    first = future.value()[0]
    return group.allreduce([first * 2]).get_future().wait()[0]
work = group.allreduce([torch.ones(3)])
futures = [group.allreduce([torch.ones(3) * i]).get_future().then(chained) for i in range(8)]
print([future.wait()[0].item() for future in futures] == [2.0 * i for i in range(8)])
dist.monitored_barrier(group, timedelta(seconds=60))
counters = collectives.statistics()["counters"]
print(counters["barnraise_comm_operations_total"] >= 17, "barnraise_wire_sent_bytes_total" in counters)
from barnraise.core import metrics
from barnraise.core.metrics.sample import value_of
def groups_open():
    return value_of(metrics.registry.samples(), "barnraise_groups_open")
print(counters["barnraise_links_open"] == 0.0, groups_open() == 1.0)
del group, work, futures
gc.collect()
give_up = time.monotonic() + 60
while groups_open() and time.monotonic() < give_up:
    time.sleep(0.05)
print(groups_open() == 0.0)
""",
    )
    assert err == ""
    assert out.split()[1:] == ["True"] * 6
    assert code == 0


@needs_fork
def test_forked_child_does_not_close_parents_comm_process(environment: dict[str, str]) -> None:
    out, err, code = _run(
        environment,
        """
work = pending()
child = os.fork()
if child == 0:
    try:
        works()
    except collectives.CommProcessLost as error:
        print("refused" if "forked" in str(error) else error, flush=True)
    group.shutdown()
    del group
    gc.collect()
    sys.exit(3)  # with all destructors and exit handlers
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert works() and not work.is_completed()
print("parent goes on")
""",
    )
    assert err == ""
    assert out.splitlines()[1:] == ["refused", "parent goes on"]
    assert code == 0


@needs_fork
def test_forked_child_does_not_keep_dead_workers_comm_process(environment: dict[str, str]) -> None:
    """The communication process notices its worker's death although a data loader's process lives on."""
    process = _start(
        environment,
        """
child = os.fork()
if child == 0:
    os.close(1); os.close(2)
    time.sleep(300)
    os._exit(0)
print(child, flush=True)
time.sleep(300)
""",
    )
    assert process.stdout is not None
    comm_process, child = int(process.stdout.readline()), int(process.stdout.readline())
    try:
        process.send_signal(signal.SIGKILL)  # not waited for: it stays a zombie
        assert _gone(comm_process)
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(("latency", "bandwidth"), [("250", "80"), ("8000", "2")])
def test_costs_that_settings_give_are_those_of_the_groups_table(
    environment: dict[str, str], latency: str, bandwidth: str
) -> None:
    """Without both settings the links would be measured, and one process alone has none."""
    costs = {
        "BARNRAISE_COLLECTIVES_COST_LATENCY_US": latency,
        "BARNRAISE_COLLECTIVES_COST_BANDWIDTH_MBPS": bandwidth,
    }
    body = """
table = group.submitter.table
print(round(table.latency_s * 1e6), round(8e-6 / table.seconds_per_byte))
"""
    out, err, code = _run(environment | costs, body)
    assert code == 0, err
    assert out.split()[1:] == [latency, bandwidth]
