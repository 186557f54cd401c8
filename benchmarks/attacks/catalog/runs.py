"""Attacks of guests on runs: rights to start, change and read them, reports, floods and pickles."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

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
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import MANIFEST, SEAL, STATE, encode, fingerprint, folder_name, sign
from barnraise.runs.checkpoint_manifest import CheckpointManifest as Checkpoint
from barnraise.runs.record import read_spec
from benchmarks.agents.runs import write_folder
from benchmarks.attacks.registry import attack, undisturbed
from benchmarks.attacks.scenes.runs import GUEST, OWNERS, RunCluster

_MAX_FLOODED = 160 << 20  # three links may each hold what their limits allow


# rights to start and change a run


@attack("guest-starts-run", "guest", "starts and stops runs, by command and by request", RunCluster)
def start_run(cluster: RunCluster) -> str:
    folder = cluster.new_folder()
    write_folder(folder, f"open({str(cluster.canary)!r}, 'w')\n")
    with cluster.unchanged():
        before = cluster.runs(0)
        done = cluster.line.run(GUEST, "run", "--on", "h0", "train.py", folder=folder)
        assert done.returncode != 0, "the command was accepted"
        assert "guests cannot start runs" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        program = RunProgram(command=("-c", "pass"), folder=bytes(32))
        words = ""
        try:
            cluster.machines.ask(GUEST, StartRunRequest(program=program, on=("h0",)), RunStarted)
        except BarnraiseError as error:
            words = str(error)
        assert "cannot start runs" in words, "the request was accepted"
        assert cluster.line.run(GUEST, "stop", cluster.run).returncode != 0, "it stopped an owner's run"
        assert cluster.runs(0) == before, "there is a new run"
    return "each is rejected with a message, and no run is new"


@attack("guest-worker-starts-run", "guest", "a worker on its machine starts a run", RunCluster)
def start_run_from_worker(cluster: RunCluster) -> str:
    # The worker has all rights of the guest's user.
    folder = cluster.new_folder()
    write_folder(folder, _START_ANOTHER)
    with cluster.unchanged():
        run = cluster.start_run("h0,h2", folder)
        _await_question(cluster, run)
        before = cluster.runs(0)
        accepted = cluster.line.run(GUEST, "accept", run, "--yes")
        assert accepted.returncode == 0, accepted.stderr
        cluster.machines.until(lambda: cluster.phase(run) == "ended", 90.0, "it has ended")
        # The guest's machine may be slower than ours, which knows already.
        cluster.machines.until(lambda: "told" in cluster.output(run, 1), 30.0, "it was answered")
        assert "told 0" not in cluster.output(run, 1), "it started a run"
        consent = cluster.machines.state(GUEST) / "runs" / run / "accepted"
        cluster.machines.until(lambda: not consent.exists(), 30.0, "consent was for once")
        assert cluster.runs(0) == before, "there is a new run"
    return "rejected with a message, and no run is new"


_START_ANOTHER = (
    "import os, subprocess, sys\n"
    "if os.environ['RANK'] == '1':\n"
    "    open('other.py', 'w').write('print(1)')\n"
    "    command = [sys.executable, '-m', 'barnraise.cli.main', 'run', '--on', 'h0', 'other.py']\n"
    "    done = subprocess.run(command, capture_output=True, text=True)\n"
    "    print('told', done.returncode, done.stderr, flush=True)\n"
)


def _await_question(cluster: RunCluster, run: str) -> None:
    cluster.machines.until(
        lambda: "asks" in [part.stage for part in cluster.watch(run).parts], 90.0, "the guest is asked"
    )


@attack("owner-skips-consent", "owner", "runs a script on a guest's machine without its consent", RunCluster)
def run_without_consent(cluster: RunCluster) -> str:
    folder = cluster.new_folder()
    write_folder(folder, f"open({str(cluster.canary)!r}, 'w')\n")
    with cluster.unchanged():
        run = cluster.start_run("h2", folder)
        _await_question(cluster, run)
        unpacked = cluster.machines.state(GUEST) / "runs" / run / "folder"
        assert not unpacked.exists(), "the folder was unpacked before consent"
        assert cluster.line.run(0, "stop", run).returncode == 0
        cluster.machines.until(lambda: cluster.phase(run, GUEST) == "ended", 90.0, "it has ended")
    return "nothing was unpacked or run before an answer"


@attack(
    "guest-forges-orders", "guest", "sends run specs and records: own, forged, replayed, changed", RunCluster
)
def forge_orders(cluster: RunCluster) -> str:
    record = cluster.record(cluster.run)
    with cluster.unchanged():
        result = cluster.attack(
            "guest_orders",
            keep=cluster.guest,
            agents=cluster.agents,
            record=encoded_record(cluster, cluster.run),
            canary=str(cluster.canary),
        )
        assert result["cut"] == dict.fromkeys(result["cut"], 2), "a message did not close its link"
        assert cluster.record(cluster.run) == record, "the record was changed"
        assert "mallory" not in (*cluster.runs(0), *cluster.runs(1), *cluster.runs(2)), "there is a new run"
    for place in OWNERS:
        words = "is a guest and cannot start or change a run"
        named = [line for line in cluster.log_lines(place) if words in line]
        assert len(named) == 1, "the guest is named once"
    return "each cut the link, and the record is as before"


def encoded_record(cluster: RunCluster, run: str) -> str:
    """Return the record of a run as the first machine keeps it."""
    return bytes(dict(cluster.rows(0, "SELECT name, record FROM run"))[run]).hex()


# rights to read


@attack("guest-reads-run", "guest", "asks for files, output and store keys of a run of others", RunCluster)
def read_run(cluster: RunCluster) -> str:
    folder = read_spec(cluster.record(cluster.run)).program.folder
    manifest = ArtifactStore(store_directory(cluster.machines.state(0))).manifest(folder)
    assert manifest is not None
    content = next(iter(manifest.objects()))
    with cluster.unchanged():
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
    assert result["lists"] == [0, 0], "it got a list of files"
    assert result["pieces"] == 0, "it got a file"
    assert result["lacks"] >= 2
    assert (result["denied"], result["allowed"]) == (result["pleas"], 0), "it reached the store"
    assert (result["output"], result["cut_for_output"]) == (0, 4), "it got output"
    assert (result["records"], result["reports"]) == (0, 0), "it got records or reports"
    return "nothing, lacking or denied; asking for output cuts the link"


@attack("guest-forges-output", "guest", "answers for the output of another machine's worker", RunCluster)
def forge_output(cluster: RunCluster) -> str:
    with cluster.unchanged():
        forging = cluster.start(
            "guest_forges_output", keep=cluster.guest, agents=cluster.agents, serials=200, seconds=6.0
        )
        forging.await_ready()
        heard = b""
        while forging.result() is None:
            for rank in range(2):
                response = cluster.watch(cluster.run, rank, follow=(FollowPosition(1 - rank, 0),))
                heard += response.heard[0].data[:4096]
        undisturbed(b"lives" in heard, "the true output did not arrive")
        assert b"FORGED" not in heard, "forged output was shown"
    return "only the machine of a worker is believed about its output"


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


@attack(
    "guest-reads-checkpoints",
    "guest",
    "asks for, lists and offers checkpoints of a run of others",
    RunCluster,
)
def read_checkpoints(cluster: RunCluster) -> str:
    homes = [_put_checkpoint(cluster, place, 40 + os.urandom(1)[0]) for place in OWNERS]
    step = int(homes[0].name[5:])
    question = NewestCheckpointRequest(cluster.run)
    try:
        newest = cluster.machines.ask(0, question, NewestCheckpointResponse)
        assert (newest.run, newest.step) == (cluster.run, max(int(home.name[5:]) for home in homes))
        with cluster.unchanged():
            result = cluster.attack(
                "guest_wants_checkpoints",
                keep=cluster.guest,
                agents=cluster.agents,
                run=cluster.run,
                step=step,
                seconds=1.0,
            )
            now = cluster.machines.ask(0, question, NewestCheckpointResponse)
            assert now == newest, "the guest's messages changed the response"
    finally:
        for home in homes:
            shutil.rmtree(home)
    assert result["held"] == [[0, False, 0]] * 4, "it learned which checkpoints exist"
    assert result["lent"] == [0] * 6, "it got files"
    assert len(result["copies"]) == 4
    assert all(result["copies"]), "an offer was accepted"
    return "empty answers, and each offer is rejected with a reason"


# reports


@attack("guest-reports-others-run", "guest", "sends reports about a run in which it has no part", RunCluster)
def report_on_others_run(cluster: RunCluster) -> str:
    with cluster.unchanged():
        result = cluster.attack(
            "guest_reports",
            keep=cluster.guest,
            agents=cluster.agents,
            run=cluster.run,
            generation=cluster.generation,
        )
    assert result["cut"] == dict.fromkeys(result["cut"], 2), "an impossible report did not close the link"
    return "ignored; an impossible report cuts the link"


def _work(cluster: RunCluster, lie: str, seconds: float) -> dict[str, Any]:
    """Start a run of both owners and the attacker, which holds a guest's key."""
    folder = cluster.new_folder()
    write_folder(folder, "import time\ntime.sleep(600)\n")
    with cluster.unchanged(lines=60):
        working = cluster.start(
            "guest_works", keep=cluster.guest, agents=cluster.agents, lie=lie, seconds=seconds
        )
        working.await_ready()
        run = cluster.start_run("h0,h1,mallory", folder, "--restarts", "0")
        result = cluster.await_result(working)
        assert result["run"] == run, result
        assert result["begun"] == "running", result
        cluster.line.run(0, "stop", run)
        for place in OWNERS:
            cluster.machines.until(
                lambda place=place: cluster.phase(run, place) == "ended",  # type: ignore[misc]
                90.0,
                f"h{place} knows that it has ended",
            )
    return result


def _work_on(cluster: RunCluster, lie: str) -> str:
    result = _work(cluster, lie, 3.0)
    assert (result["phase"], result["generation"]) == ("running", 1), result
    return "the run went on: a machine is believed about its own workers only"


@attack("guest-ends-others", "guest", "reports that others' workers have finished", RunCluster)
def report_others_ended(cluster: RunCluster) -> str:
    return _work_on(cluster, "others have ended")


@attack("guest-fails-others", "guest", "reports that others' workers have failed", RunCluster)
def report_others_failed(cluster: RunCluster) -> str:
    return _work_on(cluster, "others have failed")


@attack("guest-invents-ranks", "guest", "reports ranks that do not exist", RunCluster)
def report_invented_ranks(cluster: RunCluster) -> str:
    return _work_on(cluster, "no such rank")


@attack("guest-hides-failure", "guest", "fails a run with the longest message, unnamed", RunCluster)
def fail_unnamed(cluster: RunCluster) -> str:
    result = _work(cluster, "long words", 60.0)
    assert result["phase"] == "ended", result
    assert result["sentence"].startswith("mallory: w"), result
    return "the run's last line names it"


@attack("guest-terminal-report", "guest", "puts terminal commands into a report", RunCluster)
def report_terminal_commands(cluster: RunCluster) -> str:
    result = _work(cluster, "words that command", 60.0)
    assert result["sentence"].startswith("mallory: "), result
    assert "\x1b" not in result["sentence"], "an escape sequence is shown"
    return "control characters were replaced"


@attack("guest-contradicts", "guest", "sends reports that contradict each other", RunCluster)
def contradict(cluster: RunCluster) -> str:
    _work(cluster, "contradictions", 3.0)
    return "no machine was disturbed"


@attack("guest-delays-files", "guest", "sends lists of files before the asked machine answers", RunCluster)
def delay_files(cluster: RunCluster) -> str:
    begin = time.monotonic()
    _work(cluster, "lists", 1.0)
    undisturbed(time.monotonic() - begin < 100.0, "longer than the timeout of a transfer")
    return "the run started in time"


@attack("guest-strains-store", "guest", "sends store operations beyond what a worker sends", RunCluster)
def strain_store(cluster: RunCluster) -> str:
    result = _work(cluster, "board", 4.0)
    assert result["answers"] > 0, "the store answered nothing, so nothing was tried"
    return "limits apply"


_PICKLES = """\
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


@attack("guest-pickle", "guest", "sends a pickle to a group that the run made with it", RunCluster)
def send_pickle(cluster: RunCluster) -> str:
    # Owners among themselves may send objects; in a group with a guest all ranks are refused alike.
    folder = cluster.new_folder()
    write_folder(folder, _PICKLES)
    with cluster.unchanged():
        run = cluster.start_run("h0,h1,h2", folder, "--set", f"CANARY={cluster.canary}")
        _await_question(cluster, run)
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
        assert "h2 is a guest in this group" in text, text
        assert "Send tensors instead" in text, text
        assert "not read" in text, text
        assert ("['word 0', 'word 1']" in text) == (rank < 2), text
    return "not read, and the error names the guest"


# floods


def _flood(cluster: RunCluster, kind: str, *, deaf: bool) -> str:
    """Check that the victim's memory stays bounded, and that the others miss no heartbeat."""
    victim = psutil.Process(cluster.machines.process(0).pid)
    with cluster.unchanged(growth=_MAX_FLOODED):
        view, rss = cluster.machines.status(1).view, victim.memory_info().rss
        flood = cluster.start(
            "guest_floods", keep=cluster.guest, agents=cluster.agents, kind=kind, seconds=3.0, deaf=deaf
        )
        flood.await_ready()
        max_growth, times = 0.0, []
        while (result := flood.result()) is None:
            max_growth = max(max_growth, victim.memory_info().rss - rss)
            begin = time.monotonic()
            cluster.machines.status(0)
            times.append(time.monotonic() - begin)
        assert result["sent"] >= 300 or result["dialled"] > 3, f"too little was sent: {result}"
        assert max_growth < _MAX_FLOODED, f"{max_growth / 2**20:.0f} MB more"
        # The median, because this process may be stopped itself. A busy agent logs stalls of a second.
        undisturbed(statistics.median(times) < 2.0, f"it took {times} s to answer")
        undisturbed(cluster.machines.status(1).view == view, "a machine was suspected")
    return f"at most {max_growth / 2**20:.0f} MB more while it lasted"


def _register_floods() -> None:
    floods = {
        "want": "requests for files",
        "want and hold": "requests for files that wait",
        "lists": "requests for lists of files",
        "output": "requests for output",
        "board": "requests to the store",
        "reports": "reports",
        "checkpoints": "requests for checkpoints",
    }
    for kind, text in floods.items():
        for deaf in (False, True):
            words = f"sends {text} without end" + (", and reads no answer" if deaf else "")
            name = f"guest-floods-{kind.replace(' ', '-')}" + ("-deaf" if deaf else "")
            attack(name, "guest", words, RunCluster, "full" if deaf else "quick")(
                lambda cluster, kind=kind, deaf=deaf: _flood(cluster, kind, deaf=deaf)  # type: ignore[misc]
            )


_register_floods()
