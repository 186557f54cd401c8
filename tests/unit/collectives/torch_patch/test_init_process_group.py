"""Unmodified scripts, started as `barnraise run` starts them, beside a real agent; compared with torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

import barnraise
from barnraise.collectives.torch_patch.init_process_group import NO_HOST, LaunchEnvironment
from barnraise.core.errors import ConfigError, ListenerError, MembershipError
from barnraise.runs.worker_environment import MASTER_ADDR
from barnraise.worker.wait_for_peers import wait_for_peers
from benchmarks.hub.process import free_port
from tests.repository import ROOT
from tests.unit.lone_agent import lone_agent, unsettled

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="written with care, not run there yet")

SCRIPTS = ROOT / "tests" / "numerics" / "scripts"
INSTEAD = "barnraise: the group of 2 ranks on 2 machines uses barnraise instead of"
_numbers = count(1)


@pytest.fixture(scope="module")
def agent() -> Iterator[Path]:
    with lone_agent() as state:
        yield state


def _launched(state: Path, rank: int, machines: str, **variables: str) -> dict[str, str]:
    """The environment of a worker, as the agent makes it."""
    places = machines.split(",")
    here = [number for number, place in enumerate(places) if place == places[rank]]
    return unsettled(
        RANK=str(rank),
        WORLD_SIZE=str(len(places)),
        LOCAL_RANK=str(here.index(rank)),
        LOCAL_WORLD_SIZE=str(len(here)),
        GROUP_RANK=places[rank],
        GROUP_WORLD_SIZE=str(len(set(places))),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(len(places)),
        ROLE_NAME="default",
        TORCHELASTIC_RUN_ID="run",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="3",
        TORCHELASTIC_USE_AGENT_STORE="False",
        MASTER_ADDR="barnraise.invalid",
        MASTER_PORT="52416",
        BARNRAISE_LAUNCHED="1",
        BARNRAISE_STATE_DIRECTORY=str(state),
        BARNRAISE_DEVICE="cpu",
        **{
            "BARNRAISE_MACHINES": machines,
            "BARNRAISE_ENGINE": "auto",
            "BARNRAISE_FABRIC": "untrusted",
            "BARNRAISE_GENERATION": "1",
            **variables,
        },
    )


def launch(
    state: Path, folder: Path, command: list[str], machines: str = "0,0", **variables: str
) -> list[tuple[str, str]]:
    """Run one worker per rank, and return their stdout and stderr. All must exit with 0."""
    run = f"run {next(_numbers)}"
    processes = []
    for rank in range(len(machines.split(","))):
        processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=_launched(state, rank, machines, BARNRAISE_RUN=run, **variables),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    report = "".join(
        f"rank {rank} ended with {process.returncode}:\n{out[-1500:]}\n{errors[-3000:]}\n"
        for rank, (process, (out, errors)) in enumerate(zip(processes, outputs, strict=True))
    )
    assert all(process.returncode == 0 for process in processes), report
    return outputs


def _run(state: Path, folder: Path, program: str, machines: str, **variables: str) -> list[tuple[str, str]]:
    (folder / "train.py").write_text("import torch, torch.distributed as dist\n" + program)
    return launch(state, folder, ["train.py"], machines, **variables)


def _losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("loss")]


# the same digits as torchrun


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "needs", "engine", "lines"),
    [
        ("ddp_training.py", "torch", "gloo", 18),
        ("fsdp2_training.py", "torch", "gloo", 6),
        ("accelerate_training.py", "accelerate", "gloo", 16),
        ("lightning_training.py", "lightning", "gloo", 9),
    ],
)
def test_unmodified_script_prints_same_output_as_torchrun(
    agent: Path, tmp_path: Path, script: str, needs: str, engine: str, lines: int
) -> None:
    pytest.importorskip(needs)
    command = [str(SCRIPTS / script)]
    if "accelerate" in script:
        command += ["--state", "state"]
    folders = [tmp_path / name for name in ("torchrun", "together", "apart")]
    for folder in folders:
        folder.mkdir()
    torchrun = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command],
        env=unsettled(ACCELERATE_USE_CPU="true"),
        cwd=folders[0],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    expected = _losses(torchrun.stdout)
    assert len(expected) == lines, torchrun.stderr[-3000:]
    together = launch(agent, folders[1], command, "0,0")
    assert _losses(together[0][0]) == expected
    assert "barnraise:" not in together[0][1]
    apart = launch(agent, folders[2], command, "0,1")
    assert _losses(apart[0][0]) == expected
    assert f"{INSTEAD} {engine}: Gloo and NCCL send plaintext" in apart[0][1]
    assert "barnraise:" not in apart[1][1], "only rank 0 says it"


# which engine, and where the ranks meet

GROUPS = """
from torch.distributed import TCPStore, init_process_group
from torch.distributed.device_mesh import init_device_mesh
import os
for _ in range(2):
    init_process_group("gloo")
    rank = dist.get_rank()
    pair, _ = dist.new_subgroups(2)
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend="gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half = dist.split_group(split_ranks=[[0, 3], [1, 2]])
    quarter = dist.split_group(half, split_ranks=[[0], [1]])
    groups = [None, pair, across, mesh.get_group("dp"), mesh.get_group("tp"), half, quarter]
    labels = []
    for group in groups:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        labels.append(f"{dist.get_backend(group)}:{int(total)}")
    print(*labels, flush=True)
    dist.destroy_process_group()
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*address, dist.get_world_size() if dist.is_initialized() else 4, rank == 0)
store.add("joined", 1)
dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
dist.destroy_process_group()
print("joined", store.get("joined").decode())
dist.init_process_group("gloo", init_method="tcp://{}:{}".format(*address), rank=rank, world_size=4)
dist.barrier()
local = TCPStore("127.0.0.1", 0, 1, True)
assert isinstance(local, TCPStore) and isinstance(local, dist.Store)
local.set("k", "v")
print("own", local.get("k").decode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_groups_get_their_backend_with_any_address(agent: Path, tmp_path: Path) -> None:
    outputs = _run(agent, tmp_path, GROUPS, "0,0,1,1")
    line = "barnraise:4 gloo:2 barnraise:2 barnraise:2 gloo:2 barnraise:2 gloo:1"
    for out, _ in outputs:
        assert out.splitlines() == [line, line, "joined 4", "own v"]
    notices = [line for line in outputs[0][1].splitlines() if line.startswith("barnraise:")]
    assert [line.split(" uses ")[0] for line in notices] == [
        "barnraise: the group of 4 ranks on 2 machines",
        "barnraise: the group of 2 ranks on 2 machines",
    ]


ASKING = """
import os
rank = int(os.environ["RANK"])
requested = "nccl" if rank == 1 and "DIFFERENT" in os.environ else os.environ["REQUESTED"] or None
dist.init_process_group(requested)
total = torch.ones(1)
dist.all_reduce(total)
print(dist.get_backend(), int(total))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "requested", "variables", "backend", "notice"),
    [
        ("0,1", "gloo", {"BARNRAISE_ENGINE": "gloo"}, "gloo", "forced with --engine; it sends plaintext"),
        ("0,1", "gloo", {"BARNRAISE_FABRIC": "trusted"}, "gloo", "is trusted; it sends plaintext"),
        ("0,1", "gloo", {"BARNRAISE_FABRIC": "trusted", "DIFFERENT": "1"}, "barnraise", "different backends"),
        ("0,0", "gloo", {"BARNRAISE_ENGINE": "barnraise"}, "barnraise", "instead of gloo"),
        ("0,0", "nccl", {}, "barnraise", "instead of nccl: NCCL needs CUDA"),
        ("0,0", "", {}, "undefined", ""),
        ("0,1", "", {}, "barnraise", "instead of the default of torch"),
    ],
)
def test_requested_backend_maps_to_chosen_backend(
    agent: Path,
    tmp_path: Path,
    machines: str,
    requested: str,
    variables: dict[str, str],
    backend: str,
    notice: str,
) -> None:
    outputs = _run(agent, tmp_path, ASKING, machines, REQUESTED=requested, **variables)
    assert [out.split() for out, _ in outputs] == [[backend, "2"]] * 2
    assert notice in outputs[0][1]
    assert bool(notice) == ("barnraise:" in outputs[0][1])


LEVELS = """
from barnraise.core import metrics
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(5000))
samples = metrics.registry.samples()
counts = [each for each in samples if each.name == "barnraise_collective_duration_seconds_count"]
names = {each.labels[1] for each in counts if each.labels[0] == "all_reduce"}
print(dist.get_backend(), *sorted(names))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["star", "tree"])
def test_levels_of_the_run_apply_to_a_script_without_session(
    agent: Path, tmp_path: Path, strategy: str
) -> None:
    levels = f'{{"inside": {{"all_reduce": "{strategy}"}}}}'
    outputs = _run(agent, tmp_path, LEVELS, "0,1", BARNRAISE_LEVELS=levels)
    assert [out.split() for out, _ in outputs] == [["barnraise", strategy]] * 2


ALONE = """
from datetime import timedelta
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
dist.init_process_group("nccl", device_id=torch.device("cuda:0"), timeout=timedelta(seconds=30))
group = dist.new_group([0], pg_options=object(), backend="nccl")
print(dist.get_backend(), dist.get_backend(group))
try:
    dist.init_process_group("gloo")
except ValueError as error:
    print(error)
try:
    dist.new_group([5])
except ValueError as error:
    print(error)
try:
    dist.init_process_group(no_such_argument=1)
except TypeError as error:
    print(error)
"""


def test_unsupported_options_are_dropped_and_torch_errors_kept(agent: Path, tmp_path: Path) -> None:
    ((out, errors),) = _run(agent, tmp_path, ALONE, "0")
    assert "device_id is ignored: the group uses barnraise instead of nccl" in out
    assert "pg_options is ignored: the group uses barnraise instead of nccl" in out
    assert "barnraise barnraise\n" in out
    assert "trying to initialize the default process group twice!" in out
    assert "Rank 5 is out of range" in out
    assert "unexpected keyword argument 'no_such_argument'" in out
    assert errors.count("barnraise: the group of 1 rank on 1 machine uses barnraise instead of nccl") == 1


def test_missing_rank_is_named_in_error(agent: Path, tmp_path: Path) -> None:
    program = """
from datetime import timedelta
try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
except Exception as error:
    print(error)
"""
    (tmp_path / "train.py").write_text("import torch, torch.distributed as dist" + program)
    done = subprocess.run(
        [sys.executable, "train.py"],
        env=_launched(agent, 0, "0,0", BARNRAISE_RUN="lonely"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "rank 1 did not call init_process_group within 2 s" in done.stdout, done.stderr
    assert "`barnraise logs lonely` shows what each worker printed" in done.stdout


SPAWNING = """
import os, sys
import torch.multiprocessing as mp

def train(rank, world):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=world)
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(1, f"{dist.get_backend()} {int(total)}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
"""


@pytest.mark.slow
def test_child_processes_of_script_are_not_wrapped(agent: Path, tmp_path: Path) -> None:
    port = str(free_port())
    (tmp_path / "train.py").write_text("import torch, torch.distributed as dist\n" + SPAWNING)
    ((out, _),) = launch(agent, tmp_path, ["train.py", port], "0")
    assert out.splitlines() == ["gloo 2"] * 2


SCAN = """
import sys
names = ("init_process_group", "new_group", "split_group", "TCPStore")
for name in names:
    print(name, getattr(dist, name).__module__)
originals = {getattr(getattr(dist, name), "__wrapped__", None) for name in names} - {None}
originals.add(torch._C._distributed_c10d.TCPStore)
if "barnraise.collectives.torch_patch.init_process_group" in sys.modules:
    print([
        (module, name)
        for module, one in list(sys.modules.items())
        if module.startswith("torch") and module != "torch._C._distributed_c10d"
        for name, value in list(vars(one).items())
        if getattr(value, "__hash__", None) and value in originals
    ])
else:
    print("nothing of ours")
"""


def test_install_wraps_all_torch_modules_only_if_launched(agent: Path, tmp_path: Path) -> None:
    ((out, _),) = _run(agent, tmp_path, SCAN, "0")
    assert out.splitlines()[-1] == "[]"
    assert "TCPStore barnraise.collectives.torch_patch.init_process_group" in out
    environment = _launched(agent, 0, "0", BARNRAISE_RUN="plain")
    del environment["BARNRAISE_LAUNCHED"]
    plain = subprocess.run(
        [sys.executable, "train.py"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert plain.stdout.splitlines()[-1] == "nothing of ours"
    assert "barnraise" not in plain.stdout.rpartition("\n")[0].replace("nothing of ours", "")


@pytest.mark.parametrize("machines", ["", "0;1", "0"])
def test_launch_environment_with_invalid_rank_raises(machines: str) -> None:
    with pytest.raises(ConfigError, match="RANK or BARNRAISE_MACHINES of this process"):
        LaunchEnvironment.read({"RANK": "1", "BARNRAISE_MACHINES": machines})


def test_launcher_and_patch_use_same_address() -> None:
    assert MASTER_ADDR == NO_HOST


# waiting for machines


def test_wait_for_machines_until_timeout(
    agent: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(agent))
    assert barnraise.wait_for_peers is wait_for_peers
    assert wait_for_peers(1, timeout=5) == 1
    with pytest.raises(MembershipError, match=r"1 of 2 machines were here after 0\.5 s"):
        wait_for_peers(2, timeout=0.5)
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    with pytest.raises(ListenerError):
        wait_for_peers(1, timeout=5)


def test_wait_for_machines_reports_progress(
    agent: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(agent))
    monkeypatch.setattr("barnraise.worker.wait_for_peers._SAY_S", 0.2)
    looks = count()
    clock = SimpleNamespace(monotonic=lambda: 0.3 * next(looks), sleep=lambda seconds: None)
    monkeypatch.setattr("barnraise.worker.wait_for_peers.time", clock)
    with pytest.raises(MembershipError):
        wait_for_peers(3, timeout=timedelta(seconds=1))
    assert "waiting for machines: 1 of 3 are here" in caplog.text
