"""Attacks of members on runs: guests that exceed their role, an owner with false files.

Meanwhile one run of two owners continues, and nothing that an attacker names is executed or written.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from barnraise.agent_client.run_options import RunProgram
from barnraise.agent_client.run_requests import (
    FollowPosition,
    NewestCheckpointRequest,
    NewestCheckpointResponse,
    RunStarted,
    StartRunRequest,
)
from barnraise.artifacts import ArtifactStore, FileEntry, store_directory
from barnraise.artifacts.store.manifest import piece_hash
from barnraise.core.errors import BarnraiseError
from barnraise.identity import NodeId, NodeKey
from barnraise.runs.checkpoint_manifest import MANIFEST, SEAL, STATE, encode, fingerprint, folder_name, sign
from barnraise.runs.checkpoint_manifest import CheckpointManifest as Checkpoint
from barnraise.runs.record import read_spec
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import write_folder
from lab import Lab
from tests.lab.attacked_cluster import ALLOCATOR_ENVIRONMENT, MAX_GROWTH, restore_after_failure
from tests.lab.run_cluster import ALL_MACHINES, GUEST, OWNERS, RunCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

MAX_FLOODED = 160 << 20  # three links may each hold what their limits allow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunCluster]:
    with Lab(hosts=4) as lab, Machines(lab.hosts[:3]) as machines:
        machines.extra |= ALLOCATOR_ENVIRONMENT
        for place in ALL_MACHINES:
            machines.launch(place)
        for place in ALL_MACHINES:
            machines.await_answer(place)
            machines.rename(place, f"h{place}")
        machines.pair(0, 1)
        machines.pair(0, GUEST, guest=True)
        yield RunCluster(lab, machines)


# rights to start and change a run


@restore_after_failure
def test_guest_cannot_start_runs(cluster: RunCluster, tmp_path: Path) -> None:
    """Reject the command line, and requests of any process of the guest's user, such as a worker."""
    write_folder(tmp_path, f"open({str(cluster.canary)!r}, 'w')\n")
    with cluster.undisturbed():
        before = cluster.runs(0)
        done = cluster.line.run(GUEST, "run", "--on", "h0", "train.py", folder=tmp_path)
        assert done.returncode != 0
        assert "guests cannot start runs" in done.stderr
        assert "Traceback" not in done.stderr
        program = RunProgram(command=("-c", "pass"), folder=bytes(32))
        request = StartRunRequest(program=program, on=("h0",))
        with pytest.raises(BarnraiseError, match="cannot start runs"):
            cluster.machines.ask(GUEST, request, RunStarted)
        stopped = cluster.line.run(GUEST, "stop", cluster.run)
        assert stopped.returncode != 0
        assert cluster.runs(0) == before


@restore_after_failure
def test_worker_on_guest_cannot_start_runs(cluster: RunCluster, tmp_path: Path) -> None:
    """Reject a worker with all rights of the guest's user."""
    tries = (
        "import os, subprocess, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    open('other.py', 'w').write('print(1)')\n"
        "    command = [sys.executable, '-m', 'barnraise.cli.main', 'run', '--on', 'h0', 'other.py']\n"
        "    done = subprocess.run(command, capture_output=True, text=True)\n"
        "    print('told', done.returncode, done.stderr, flush=True)\n"
    )
    write_folder(tmp_path, tries)
    with cluster.undisturbed():
        run = cluster.start_run("h0,h2", tmp_path)
        cluster.machines.until(
            lambda: "asks" in [part.stage for part in cluster.watch(run).parts], 90.0, "the guest is asked"
        )
        before = cluster.runs(0)
        accepted = cluster.line.run(GUEST, "accept", run, "--yes")
        assert accepted.returncode == 0, accepted.stderr
        cluster.machines.until(lambda: cluster.phase(run) == "ended", 90.0, "it has ended")
        # The guest's machine may be slower than ours, which knows already.
        cluster.machines.until(lambda: "cannot start runs" in cluster.output(run, 1), 30.0, "it was refused")
        assert "told 0" not in cluster.output(run, 1)
        accepted = cluster.machines.state(GUEST) / "runs" / run / "accepted"
        cluster.machines.until(lambda: not accepted.exists(), 30.0, "consent was for once")
        assert cluster.runs(0) == before


@restore_after_failure
def test_run_on_guest_waits_for_consent(cluster: RunCluster, tmp_path: Path) -> None:
    write_folder(tmp_path, f"open({str(cluster.canary)!r}, 'w')\n")
    with cluster.undisturbed():
        run = cluster.start_run("h2", tmp_path)
        cluster.machines.until(
            lambda: "asks" in [part.stage for part in cluster.watch(run).parts], 90.0, "the guest is asked"
        )
        assert not (cluster.machines.state(GUEST) / "runs" / run / "folder").exists()
        assert cluster.line.run(0, "stop", run).returncode == 0
        cluster.machines.until(lambda: cluster.phase(run, GUEST) == "ended", 90.0, "it has ended")


@restore_after_failure
def test_guest_cannot_write_or_change_run_specs(cluster: RunCluster) -> None:
    record = cluster.record(cluster.run)
    encoded = _encoded(cluster, cluster.run)
    with cluster.undisturbed():
        result = cluster.attack(
            "guest_orders",
            keep=cluster.guest,
            agents=cluster.agents,
            record=encoded,
            canary=str(cluster.canary),
        )
        assert result["cut"] == dict.fromkeys(result["cut"], 2), "each message closes the link"
        assert cluster.record(cluster.run) == record
        assert "mallory" not in (*cluster.runs(0), *cluster.runs(1), *cluster.runs(2))
    for place in OWNERS:
        named = [
            line for line in cluster.log_lines(place) if "is a guest and cannot start or change a run" in line
        ]
        assert len(named) == 1, "the guest is named once"


@restore_after_failure
def test_owner_cannot_sign_run_specs_for_others(cluster: RunCluster) -> None:
    record = cluster.record(cluster.run)
    with cluster.undisturbed():
        result = cluster.attack(
            "owner_orders",
            keep=cluster.owner,
            agents=cluster.agents,
            record=_encoded(cluster, cluster.run),
            guest=cluster.guest,
            canary=str(cluster.canary),
        )
        assert result["cut"] == dict.fromkeys(result["cut"], 2)
        assert cluster.record(cluster.run) == record
        assert "mallory" not in (*cluster.runs(0), *cluster.runs(1), *cluster.runs(2))


def _encoded(cluster: RunCluster, run: str) -> str:
    return bytes(dict(cluster.rows(0, "SELECT name, record FROM run"))[run]).hex()


# rights to read


@restore_after_failure
def test_guest_cannot_read_other_runs(cluster: RunCluster) -> None:
    folder = read_spec(cluster.record(cluster.run)).program.folder
    manifest = ArtifactStore(store_directory(cluster.machines.state(0))).manifest(folder)
    assert manifest is not None
    content = next(iter(manifest.objects()))
    with cluster.undisturbed():
        result = cluster.attack(
            "guest_asks",
            keep=cluster.guest,
            agents=cluster.agents,
            run=cluster.run,
            generation=cluster.generation,
            folder=folder.hex(),
            content=content.hex(),
            seconds=4.0,
        )
    assert result["lists"] == [0, 0]
    assert result["pieces"] == 0
    assert result["lacks"] >= 2
    assert (result["denied"], result["allowed"]) == (result["pleas"], 0)
    assert (result["output"], result["cut_for_output"]) == (0, 4)
    assert (result["records"], result["reports"]) == (0, 0)


@restore_after_failure
def test_guest_answers_for_others_are_ignored(cluster: RunCluster) -> None:
    """Only the machine of a worker answers for its output."""
    with cluster.undisturbed():
        forging = cluster.start(
            "guest_forges_output", keep=cluster.guest, agents=cluster.agents, serials=200, seconds=6.0
        )
        forging.await_ready()
        heard = b""
        while forging.result() is None:
            for rank in range(2):
                response = cluster.watch(cluster.run, rank, follow=(FollowPosition(1 - rank, 0),))
                heard += response.heard[0].data[:4096]
        assert b"lives" in heard
        assert b"FORGED" not in heard


# reports


@restore_after_failure
def test_reports_about_runs_of_others_are_rejected(cluster: RunCluster) -> None:
    with cluster.undisturbed():
        result = cluster.attack(
            "guest_reports",
            keep=cluster.guest,
            agents=cluster.agents,
            run=cluster.run,
            generation=cluster.generation,
        )
    assert result["cut"] == dict.fromkeys(result["cut"], 2), "an impossible report closes the link"


def _work_with(cluster: RunCluster, folder: Path, lie: str, seconds: float) -> dict[str, Any]:
    """Start a run of both owners and the attacker, which holds a guest's key."""
    write_folder(folder, "import time\ntime.sleep(600)\n")
    with cluster.undisturbed(lines=60):
        working = cluster.start(
            "guest_works", keep=cluster.guest, agents=cluster.agents, lie=lie, seconds=seconds
        )
        working.await_ready()
        run = cluster.start_run("h0,h1,mallory", folder, "--restarts", "0")
        result = cluster.await_result(working)
        assert result["run"] == run
        assert result["begun"] == "running", result
        cluster.line.run(0, "stop", run)
        for place in OWNERS:
            cluster.machines.until(
                lambda place=place: cluster.phase(run, place) == "ended",  # type: ignore[misc]
                90.0,
                f"h{place} knows that it has ended",
            )
    return result


@pytest.mark.parametrize("lie", ["others have ended", "others have failed", "no such rank"])
@restore_after_failure
def test_guest_reports_count_for_own_workers_only(cluster: RunCluster, tmp_path: Path, lie: str) -> None:
    result = _work_with(cluster, tmp_path, lie, 3.0)
    assert (result["phase"], result["generation"]) == ("running", 1), result


@restore_after_failure
def test_guest_that_fails_a_run_is_named(cluster: RunCluster, tmp_path: Path) -> None:
    """The guest may fail with the longest allowed message."""
    result = _work_with(cluster, tmp_path, "long words", 60.0)
    assert result["phase"] == "ended", result
    assert result["sentence"].startswith("mallory: w")


@restore_after_failure
def test_guest_text_has_no_terminal_commands(cluster: RunCluster, tmp_path: Path) -> None:
    result = _work_with(cluster, tmp_path, "words that command", 60.0)
    assert result["sentence"].startswith("mallory: ")
    assert "\x1b" not in result["sentence"]


@restore_after_failure
def test_contradictory_reports_of_guest_are_harmless(cluster: RunCluster, tmp_path: Path) -> None:
    _work_with(cluster, tmp_path, "contradictions", 3.0)


@restore_after_failure
def test_guest_cannot_delay_files_of_others(cluster: RunCluster, tmp_path: Path) -> None:
    begin = time.monotonic()
    _work_with(cluster, tmp_path, "lists", 1.0)
    assert time.monotonic() - begin < 100.0, "less than the timeout of a transfer"


@restore_after_failure
def test_guest_load_on_store_is_limited(cluster: RunCluster, tmp_path: Path) -> None:
    result = _work_with(cluster, tmp_path, "board", 4.0)
    assert result["answers"] > 0


# false files of an owner


LISTS = {
    "above": "does not stay below the folder",
    "far above": "does not stay below the folder",
    "absolute": "does not stay below the folder",
    "drive": "which Windows does not allow",
    "backslash": "which Windows does not allow",
    "stream": "which Windows does not allow",
    "device": "the name of a device on Windows",
    "case": "differ only in case",
    "form": "differ only in case or in the form of a letter",
    "under a file": "is a file and",
    "dot": "does not stay below the folder",
    "empty": "does not stay below the folder",
    "not in order": "its paths are not in order",
    "a terabyte": "it describes",
    "many files": "files",
}


def _ship(cluster: RunCluster, kind: str, seconds: float = 80.0) -> dict[str, Any]:
    run = f"mallory-{kind.replace(' ', '-')}-{os.urandom(2).hex()}"
    result = cluster.attack(
        "owner_ships",
        keep=cluster.owner,
        agents=cluster.agents,
        run=run,
        kind=kind,
        canary=str(cluster.canary),
        seconds=seconds,
    )
    for place in OWNERS:
        assert not (cluster.machines.state(place) / "runs" / run / "folder").exists(), "nothing is unpacked"
    return {**result, "run": run}


@pytest.mark.parametrize("kind", LISTS)
@restore_after_failure
def test_unrequested_file_lists_are_rejected(cluster: RunCluster, kind: str) -> None:
    with cluster.undisturbed(growth=8 * MAX_GROWTH):
        result = _ship(cluster, kind)
        assert result["phase"] == "ended", result
        assert LISTS[kind] in result["sentence"], result


@restore_after_failure
def test_oversized_file_list_is_rejected(cluster: RunCluster) -> None:
    """The list does not arrive; the run waits for it, and a user may stop the run."""
    with cluster.undisturbed(growth=8 * MAX_GROWTH):
        result = _ship(cluster, "a million files", 5.0)
        assert result["phase"] == "preparing", result
        assert cluster.line.run(1, "stop", result["run"]).returncode == 0
        cluster.machines.until(lambda: cluster.phase(result["run"]) == "ended", 90.0, "it has ended")


@restore_after_failure
def test_source_with_wrong_bytes_is_rejected(cluster: RunCluster) -> None:
    with cluster.undisturbed():
        result = _ship(cluster, "wrong bytes")
        assert result["phase"] == "ended", result
        assert f"node {NodeId(bytes.fromhex(cluster.owner_id)).short} sent wrong bytes" in result["sentence"]
        for place in OWNERS:
            store = ArtifactStore(store_directory(cluster.machines.state(place)))
            contents = [
                path.read_bytes() for path in store.objects.glob("??/*") if path.stat().st_size < 4096
            ]
            assert b"print('shipped')\n".swapcase() not in contents


# checkpoints


def _put_checkpoint(cluster: RunCluster, place: int, step: int) -> Path:
    """Write a checkpoint as a session on that machine saves it."""
    key, state = NodeKey.load_or_create(cluster.machines.state(place) / "node.key"), b"a state"
    file = FileEntry(STATE, len(state), False, (piece_hash(state),)).object.hex()
    fields = {"run": cluster.run, "step": step, "generation": 1, "digest": "0" * 64, "previous": None}
    data = encode(Checkpoint(**fields, file=file, skeleton=""))  # type: ignore[arg-type]
    home = cluster.machines.state(place) / "runs" / cluster.run / "checkpoints" / folder_name(step)
    home.mkdir(parents=True)
    seal = encode(sign(key, cluster.run, step, fingerprint(data)))
    for name, content in ((STATE, state), (MANIFEST, data), (SEAL, seal)):
        (home / name).write_bytes(content)
    return home


@restore_after_failure
def test_guest_cannot_read_checkpoints_of_others(cluster: RunCluster) -> None:
    """The guest cannot list or store checkpoints either, nor respond for others."""
    homes = [_put_checkpoint(cluster, place, 40 + os.urandom(1)[0]) for place in OWNERS]
    step = int(homes[0].name[5:])
    try:
        newest = cluster.machines.ask(0, NewestCheckpointRequest(cluster.run), NewestCheckpointResponse)
        assert (newest.run, newest.step) == (cluster.run, max(int(home.name[5:]) for home in homes))
        with cluster.undisturbed():
            result = cluster.attack(
                "guest_wants_checkpoints",
                keep=cluster.guest,
                agents=cluster.agents,
                run=cluster.run,
                step=step,
                seconds=1.0,
            )
            assert (
                cluster.machines.ask(0, NewestCheckpointRequest(cluster.run), NewestCheckpointResponse)
                == newest
            ), "the guest's messages changed the response"
    finally:
        for home in homes:
            shutil.rmtree(home)
    assert result["held"] == [[0, False, 0]] * 4
    assert result["lent"] == [0] * 6
    assert len(result["copies"]) == 4
    assert all(result["copies"]), "each is rejected with a reason"


OFFERS = {
    "another run": "it belongs to run another-run",
    "another step": "it was changed after it was signed",
    "another state": "the fetched files are another checkpoint than the requested one",
    "a stranger's signature": "it was not signed by a machine of this cluster",
    "changed afterwards": "it was changed after it was signed",
    "a terabyte": "",
    "the run's own folder": "the fetched files are not a checkpoint",
}


@restore_after_failure
def test_false_checkpoint_copies_are_rejected(cluster: RunCluster) -> None:
    order = read_spec(cluster.record(cluster.run))
    for lie, words in OFFERS.items():
        with cluster.undisturbed():
            result = cluster.attack(
                "owner_offers",
                keep=cluster.owner,
                agents=cluster.agents,
                run=cluster.run,
                lie=lie,
                folder=order.program.folder.hex(),
                seconds=60.0,
            )
        assert len(result["words"]) == 2, (lie, result)
        assert all(words in text and text for text in result["words"]), (lie, result)
        for place in OWNERS:
            state = cluster.machines.state(place)
            assert not list((state / "runs" / cluster.run).glob("checkpoints/step-00000007")), lie
            store = ArtifactStore(store_directory(state))
            folder = store.manifest(order.program.folder)
            assert folder is not None, f"{lie}: the run's list of files is gone"
            assert not store.missing(folder), f"{lie}: files of the run are gone"


PICKLES = """\
import os, pickle, sys, torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from barnraise.core.errors import UntrustedPickle

class Bomb:
    def __reduce__(self):
        return open, (os.environ["CANARY"], "w")

dist.init_process_group("gloo")
rank, lines = dist.get_rank(), []
owners = dist.new_group([0, 1])
bomb = torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8)
try:
    dist.all_gather_object([None] * 3, Bomb())
    lines.append("all_gather_object was let through")
except UntrustedPickle as error:
    lines.append(str(error))
dist.broadcast(bomb, 2)  # tensors pass, with any content
try:
    distributed_c10d._tensor_to_object(bomb, bomb.numel(), dist.group.WORLD)
    lines.append("it was read")
except UntrustedPickle:
    lines.append("not read")
if rank < 2:
    words = [None, None]
    dist.all_gather_object(words, f"word {rank}", group=owners)
    lines.append(str(words))
total = torch.ones(1)
dist.all_reduce(total)
print("SAID", rank, int(total), lines, flush=True)
dist.destroy_process_group()
"""


@restore_after_failure
def test_pickles_of_guest_are_rejected(cluster: RunCluster, tmp_path: Path) -> None:
    """Owners among themselves may send objects; in a group with a guest all ranks are refused alike."""
    write_folder(tmp_path, PICKLES)
    with cluster.undisturbed():
        run = cluster.start_run("h0,h1,h2", tmp_path, "--set", f"CANARY={cluster.canary}")
        cluster.machines.until(
            lambda: "asks" in [part.stage for part in cluster.watch(run).parts], 60.0, "the guest is asked"
        )
        assert cluster.line.run(GUEST, "accept", run, "--yes").returncode == 0
        cluster.machines.until(lambda: cluster.phase(run) == "ended", 100.0, "it has ended")
        for rank in range(3):
            cluster.machines.until(
                lambda rank=rank: f"SAID {rank} 3" in cluster.output(run, rank),  # type: ignore[misc]
                30.0,
                f"rank {rank} has said it",
            )
        outputs = [cluster.output(run, rank) for rank in range(3)]
    for rank, text in enumerate(outputs):
        assert "h2 is a guest in this group" in text
        assert "Send tensors instead" in text
        assert "not read" in text
        assert ("['word 0', 'word 1']" in text) == (rank < 2)


# floods

FLOODS = ["want", "want and hold", "lists", "output", "board", "reports", "checkpoints"]


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("kind", FLOODS)
@restore_after_failure
def test_floods_of_requests_are_limited(cluster: RunCluster, kind: str, deaf: bool) -> None:
    """The victim's memory stays bounded, and the others miss no heartbeat."""
    victim = psutil.Process(cluster.machines.process(0).pid)
    with cluster.undisturbed(growth=MAX_FLOODED):
        view = cluster.machines.status(1).view
        rss = victim.memory_info().rss
        flood = cluster.start(
            "guest_floods", keep=cluster.guest, agents=cluster.agents, kind=kind, seconds=3.0, deaf=deaf
        )
        flood.await_ready()
        max_growth, times = 0.0, []
        while flood.result() is None:
            max_growth = max(max_growth, victim.memory_info().rss - rss)
            begin = time.monotonic()
            cluster.machines.status(0)
            times.append(time.monotonic() - begin)
        result = flood.result()
        assert result is not None
        assert result["sent"] >= 300 or result["dialled"] > 3, result
        assert max_growth < MAX_FLOODED, f"{max_growth / 2**20:.0f} MB more"
        # The median, because this process may be stopped itself. A busy agent logs stalls of a second.
        assert statistics.median(times) < 2.0, f"it took {times} s to answer"
        assert cluster.machines.status(1).view == view, "no machine was suspected"
