"""Attacks of members on runs: guests that want more, an owner that lies about files.

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
from tests.lab.besieged import MOST_GROWTH, RETURNS_WHAT_IS_FREED, settles_after_a_failure
from tests.lab.run_yard import EVERYBODY, GUEST, OWNERS, Yard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

MOST_FLOODED = 160 << 20  # three links may each hold what their limits allow


@pytest.fixture(scope="module")
def yard() -> Iterator[Yard]:
    with Lab(hosts=4) as lab, Machines(lab.hosts[:3]) as machines:
        machines.extra |= RETURNS_WHAT_IS_FREED
        for place in EVERYBODY:
            machines.launch(place)
        for place in EVERYBODY:
            machines.await_answer(place)
            machines.rename(place, f"h{place}")
        machines.pair(0, 1)
        machines.pair(0, GUEST, guest=True)
        yield Yard(lab, machines)


# who may start and change a run


@settles_after_a_failure
def test_guest_cannot_start_runs(yard: Yard, tmp_path: Path) -> None:
    """Neither by the command line nor by what any process of its user, such as a worker, can ask."""
    write_folder(tmp_path, f"open({str(yard.canary)!r}, 'w')\n")
    with yard.undisturbed():
        before = yard.runs(0)
        done = yard.line.run(GUEST, "run", "--on", "h0", "train.py", folder=tmp_path)
        assert done.returncode != 0
        assert "guests cannot start runs" in done.stderr
        assert "Traceback" not in done.stderr
        program = RunProgram(command=("-c", "pass"), folder=bytes(32))
        asked = StartRunRequest(program=program, on=("h0",))
        with pytest.raises(BarnraiseError, match="cannot start runs"):
            yard.machines.ask(GUEST, asked, RunStarted)
        stopped = yard.line.run(GUEST, "stop", yard.run)
        assert stopped.returncode != 0
        assert yard.runs(0) == before


@settles_after_a_failure
def test_worker_on_guest_cannot_start_runs(yard: Yard, tmp_path: Path) -> None:
    """It has all rights of the guest's user, and these are not enough."""
    tries = (
        "import os, subprocess, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    open('other.py', 'w').write('print(1)')\n"
        "    command = [sys.executable, '-m', 'barnraise.cli.main', 'run', '--on', 'h0', 'other.py']\n"
        "    done = subprocess.run(command, capture_output=True, text=True)\n"
        "    print('told', done.returncode, done.stderr, flush=True)\n"
    )
    write_folder(tmp_path, tries)
    with yard.undisturbed():
        run = yard.begin("h0,h2", tmp_path)
        yard.machines.until(
            lambda: "asks" in [part.stage for part in yard.watch(run).parts], 90.0, "the guest is asked"
        )
        before = yard.runs(0)
        accepted = yard.line.run(GUEST, "accept", run, "--yes")
        assert accepted.returncode == 0, accepted.stderr
        yard.machines.until(lambda: yard.phase(run) == "ended", 90.0, "it has ended")
        # The guest's machine may be slower than ours, which knows already.
        yard.machines.until(lambda: "cannot start runs" in yard.said(run, 1), 30.0, "it was refused")
        assert "told 0" not in yard.said(run, 1)
        accepted = yard.machines.state(GUEST) / "runs" / run / "accepted"
        yard.machines.until(lambda: not accepted.exists(), 30.0, "consent was for once")
        assert yard.runs(0) == before


@settles_after_a_failure
def test_run_on_guest_waits_for_consent(yard: Yard, tmp_path: Path) -> None:
    write_folder(tmp_path, f"open({str(yard.canary)!r}, 'w')\n")
    with yard.undisturbed():
        run = yard.begin("h2", tmp_path)
        yard.machines.until(
            lambda: "asks" in [part.stage for part in yard.watch(run).parts], 90.0, "the guest is asked"
        )
        assert not (yard.machines.state(GUEST) / "runs" / run / "folder").exists()
        assert yard.line.run(0, "stop", run).returncode == 0
        yard.machines.until(lambda: yard.phase(run, GUEST) == "ended", 90.0, "it has ended")


@settles_after_a_failure
def test_guest_cannot_write_or_change_run_specs(yard: Yard) -> None:
    record = yard.record(yard.run)
    encoded = _encoded(yard, yard.run)
    with yard.undisturbed():
        found = yard.attack(
            "guest_orders", keep=yard.guest, agents=yard.agents, record=encoded, canary=str(yard.canary)
        )
        assert found["cut"] == dict.fromkeys(found["cut"], 2), "each of them ends the link"
        assert yard.record(yard.run) == record
        assert "mallory" not in (*yard.runs(0), *yard.runs(1), *yard.runs(2))
    for place in OWNERS:
        named = [line for line in yard.words(place) if "is a guest and cannot start or change a run" in line]
        assert len(named) == 1, "named, and once"


@settles_after_a_failure
def test_owner_cannot_sign_run_specs_for_others(yard: Yard) -> None:
    record = yard.record(yard.run)
    with yard.undisturbed():
        found = yard.attack(
            "owner_orders",
            keep=yard.owner,
            agents=yard.agents,
            record=_encoded(yard, yard.run),
            guest=yard.guest,
            canary=str(yard.canary),
        )
        assert found["cut"] == dict.fromkeys(found["cut"], 2)
        assert yard.record(yard.run) == record
        assert "mallory" not in (*yard.runs(0), *yard.runs(1), *yard.runs(2))


def _encoded(yard: Yard, run: str) -> str:
    return bytes(dict(yard.rows(0, "SELECT name, record FROM run"))[run]).hex()


# what a guest may know


@settles_after_a_failure
def test_guest_cannot_read_other_runs(yard: Yard) -> None:
    folder = read_spec(yard.record(yard.run)).folder
    manifest = ArtifactStore(store_directory(yard.machines.state(0))).manifest(folder)
    assert manifest is not None
    content = next(iter(manifest.objects()))
    with yard.undisturbed():
        found = yard.attack(
            "guest_asks",
            keep=yard.guest,
            agents=yard.agents,
            run=yard.run,
            generation=yard.generation,
            folder=folder.hex(),
            content=content.hex(),
            seconds=4.0,
        )
    assert found["lists"] == [0, 0]
    assert found["pieces"] == 0
    assert found["lacks"] >= 2
    assert (found["denied"], found["allowed"]) == (found["pleas"], 0)
    assert (found["output"], found["cut_for_output"]) == (0, 4)
    assert (found["records"], found["reports"]) == (0, 0)


@settles_after_a_failure
def test_guest_answers_for_others_are_ignored(yard: Yard) -> None:
    """Only the machine of a worker answers for its output."""
    with yard.undisturbed():
        forging = yard.start(
            "guest_forges_output", keep=yard.guest, agents=yard.agents, serials=200, seconds=6.0
        )
        forging.await_ready()
        heard = b""
        while forging.result() is None:
            for rank in range(2):
                told = yard.watch(yard.run, rank, follow=(FollowPosition(1 - rank, yard.generation, 0),))
                heard += told.heard[0].data[:4096]
        assert b"lives" in heard
        assert b"FORGED" not in heard


# reports


@settles_after_a_failure
def test_reports_about_runs_of_others(yard: Yard) -> None:
    with yard.undisturbed():
        found = yard.attack(
            "guest_reports", keep=yard.guest, agents=yard.agents, run=yard.run, generation=yard.generation
        )
    assert found["cut"] == dict.fromkeys(found["cut"], 2), "what no machine reports ends the link"


def _work_with(yard: Yard, folder: Path, lie: str, seconds: float) -> dict[str, Any]:
    """A run of both owners and the attacker, whose key is a guest's."""
    write_folder(folder, "import time\ntime.sleep(600)\n")
    with yard.undisturbed(lines=60):
        working = yard.start("guest_works", keep=yard.guest, agents=yard.agents, lie=lie, seconds=seconds)
        working.await_ready()
        run = yard.begin("h0,h1,mallory", folder, "--restarts", "0")
        found = yard.end(working)
        assert found["run"] == run
        assert found["begun"] == "running", found
        yard.line.run(0, "stop", run)
        for place in OWNERS:
            yard.machines.until(
                lambda place=place: yard.phase(run, place) == "ended",  # type: ignore[misc]
                90.0,
                f"h{place} knows that it has ended",
            )
    return found


@pytest.mark.parametrize("lie", ["others have ended", "others have failed", "no such rank"])
@settles_after_a_failure
def test_guest_reports_count_for_own_workers_only(yard: Yard, tmp_path: Path, lie: str) -> None:
    found = _work_with(yard, tmp_path, lie, 3.0)
    assert (found["phase"], found["generation"]) == ("running", 1), found


@settles_after_a_failure
def test_guest_that_fails_a_run_is_named(yard: Yard, tmp_path: Path) -> None:
    """It may fail, and say so at any length that is allowed; the owners bear it."""
    found = _work_with(yard, tmp_path, "long words", 60.0)
    assert found["phase"] == "ended", found
    assert found["sentence"].startswith("mallory: w")


@settles_after_a_failure
def test_guest_text_has_no_terminal_commands(yard: Yard, tmp_path: Path) -> None:
    found = _work_with(yard, tmp_path, "words that command", 60.0)
    assert found["sentence"].startswith("mallory: ")
    assert "\x1b" not in found["sentence"]


@settles_after_a_failure
def test_contradictory_reports_of_guest_are_harmless(yard: Yard, tmp_path: Path) -> None:
    _work_with(yard, tmp_path, "contradictions", 3.0)


@settles_after_a_failure
def test_guest_cannot_delay_files_of_others(yard: Yard, tmp_path: Path) -> None:
    begin = time.monotonic()
    _work_with(yard, tmp_path, "lists", 1.0)
    assert time.monotonic() - begin < 100.0, "less than the patience of who waits for files"


@settles_after_a_failure
def test_guest_load_on_store_is_limited(yard: Yard, tmp_path: Path) -> None:
    found = _work_with(yard, tmp_path, "board", 4.0)
    assert found["answers"] > 0


# files from an owner that lies


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


def _ship(yard: Yard, kind: str, seconds: float = 80.0) -> dict[str, Any]:
    run = f"mallory-{kind.replace(' ', '-')}-{os.urandom(2).hex()}"
    found = yard.attack(
        "owner_ships",
        keep=yard.owner,
        agents=yard.agents,
        run=run,
        kind=kind,
        canary=str(yard.canary),
        seconds=seconds,
    )
    for place in OWNERS:
        assert not (yard.machines.state(place) / "runs" / run / "folder").exists(), "nothing is unpacked"
    return {**found, "run": run}


@pytest.mark.parametrize("kind", LISTS)
@settles_after_a_failure
def test_unrequested_file_lists_are_rejected(yard: Yard, kind: str) -> None:
    with yard.undisturbed(growth=8 * MOST_GROWTH):
        found = _ship(yard, kind)
        assert found["phase"] == "ended", found
        assert LISTS[kind] in found["sentence"], found


@settles_after_a_failure
def test_oversized_file_list_is_rejected(yard: Yard) -> None:
    """The list does not arrive; the run waits for it, and a user may stop the run."""
    with yard.undisturbed(growth=8 * MOST_GROWTH):
        found = _ship(yard, "a million files", 5.0)
        assert found["phase"] == "preparing", found
        assert yard.line.run(1, "stop", found["run"]).returncode == 0
        yard.machines.until(lambda: yard.phase(found["run"]) == "ended", 90.0, "it has ended")


@settles_after_a_failure
def test_source_with_wrong_bytes_is_rejected(yard: Yard) -> None:
    with yard.undisturbed():
        found = _ship(yard, "wrong bytes")
        assert found["phase"] == "ended", found
        assert f"node {NodeId(bytes.fromhex(yard.owner_id)).short} sent wrong bytes" in found["sentence"]
        for place in OWNERS:
            store = ArtifactStore(store_directory(yard.machines.state(place)))
            contents = [
                path.read_bytes() for path in store.objects.glob("??/*") if path.stat().st_size < 4096
            ]
            assert b"print('shipped')\n".swapcase() not in contents


# checkpoints


def _put_checkpoint(yard: Yard, place: int, step: int) -> Path:
    """As a session of that machine would have saved it."""
    key, state = NodeKey.load_or_create(yard.machines.state(place) / "node.key"), b"a state"
    file = FileEntry(STATE, len(state), False, (piece_hash(state),)).object.hex()
    told = {"run": yard.run, "step": step, "generation": 1, "digest": "0" * 64, "previous": None}
    data = encode(Checkpoint(**told, file=file, skeleton=""))  # type: ignore[arg-type]
    home = yard.machines.state(place) / "runs" / yard.run / "checkpoints" / folder_name(step)
    home.mkdir(parents=True)
    seal = encode(sign(key, yard.run, step, fingerprint(data)))
    for name, content in ((STATE, state), (MANIFEST, data), (SEAL, seal)):
        (home / name).write_bytes(content)
    return home


@settles_after_a_failure
def test_guest_cannot_read_checkpoints_of_others(yard: Yard) -> None:
    """Nor does it learn of any, have one kept, or answer in the place of others."""
    homes = [_put_checkpoint(yard, place, 40 + os.urandom(1)[0]) for place in OWNERS]
    step = int(homes[0].name[5:])
    try:
        newest = yard.machines.ask(0, NewestCheckpointRequest(yard.run), NewestCheckpointResponse)
        assert (newest.run, newest.step) == (yard.run, max(int(home.name[5:]) for home in homes))
        with yard.undisturbed():
            found = yard.attack(
                "guest_wants_checkpoints",
                keep=yard.guest,
                agents=yard.agents,
                run=yard.run,
                step=step,
                seconds=1.0,
            )
            assert (
                yard.machines.ask(0, NewestCheckpointRequest(yard.run), NewestCheckpointResponse) == newest
            ), "nothing that it says"
    finally:
        for home in homes:
            shutil.rmtree(home)
    assert found["held"] == [[0, False, 0]] * 4
    assert found["lent"] == [0] * 6
    assert len(found["copies"]) == 4
    assert all(found["copies"]), "each is refused, with words"


OFFERS = {
    "another run": "it belongs to run another-run",
    "another step": "it was changed after it was signed",
    "another state": "the fetched files are another checkpoint than the requested one",
    "a stranger's signature": "it is signed by nobody of this cluster",
    "changed afterwards": "it was changed after it was signed",
    "a terabyte": "",
    "the run's own folder": "the fetched files are not a checkpoint",
}


@settles_after_a_failure
def test_copies_that_are_not_what_they_say(yard: Yard) -> None:
    order = read_spec(yard.record(yard.run))
    for lie, words in OFFERS.items():
        with yard.undisturbed():
            found = yard.attack(
                "owner_offers",
                keep=yard.owner,
                agents=yard.agents,
                run=yard.run,
                lie=lie,
                folder=order.program.folder.hex(),
                seconds=60.0,
            )
        assert len(found["words"]) == 2, (lie, found)
        assert all(words in one and one for one in found["words"]), (lie, found)
        for place in OWNERS:
            state = yard.machines.state(place)
            assert not list((state / "runs" / yard.run).glob("checkpoints/step-00000007")), lie
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
rank, said = dist.get_rank(), []
owners = dist.new_group([0, 1])
bomb = torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8)
try:
    dist.all_gather_object([None] * 3, Bomb())
    said.append("all_gather_object was let through")
except UntrustedPickle as error:
    said.append(str(error))
dist.broadcast(bomb, 2)  # tensors pass, whatever is in them
try:
    distributed_c10d._tensor_to_object(bomb, bomb.numel(), dist.group.WORLD)
    said.append("it was read")
except UntrustedPickle:
    said.append("not read")
if rank < 2:
    words = [None, None]
    dist.all_gather_object(words, f"word {rank}", group=owners)
    said.append(str(words))
total = torch.ones(1)
dist.all_reduce(total)
print("SAID", rank, int(total), said, flush=True)
dist.destroy_process_group()
"""


@settles_after_a_failure
def test_pickles_of_guest_are_rejected(yard: Yard, tmp_path: Path) -> None:
    """Owners among themselves may send objects; in a group with a guest all ranks are refused alike."""
    write_folder(tmp_path, PICKLES)
    with yard.undisturbed():
        run = yard.begin("h0,h1,h2", tmp_path, "--set", f"CANARY={yard.canary}")
        yard.machines.until(
            lambda: "asks" in [part.stage for part in yard.watch(run).parts], 60.0, "the guest is asked"
        )
        assert yard.line.run(GUEST, "accept", run, "--yes").returncode == 0
        yard.machines.until(lambda: yard.phase(run) == "ended", 100.0, "it has ended")
        for rank in range(3):
            yard.machines.until(
                lambda rank=rank: f"SAID {rank} 3" in yard.said(run, rank),  # type: ignore[misc]
                30.0,
                f"rank {rank} has said it",
            )
        said = [yard.said(run, rank) for rank in range(3)]
    for rank, text in enumerate(said):
        assert "h2 is a guest in this group" in text
        assert "Send tensors instead" in text
        assert "not read" in text
        assert ("['word 0', 'word 1']" in text) == (rank < 2)


# too much

FLOODS = ["want", "want and hold", "lists", "output", "board", "reports", "checkpoints"]


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("kind", FLOODS)
@settles_after_a_failure
def test_floods_of_questions(yard: Yard, kind: str, deaf: bool) -> None:
    """The victim's memory is bounded while it goes on, and the others miss no heartbeat."""
    victim = psutil.Process(yard.machines.process(0).pid)
    with yard.undisturbed(growth=MOST_FLOODED):
        view = yard.machines.status(1).view
        rss = victim.memory_info().rss
        flood = yard.start(
            "guest_floods", keep=yard.guest, agents=yard.agents, kind=kind, seconds=3.0, deaf=deaf
        )
        flood.await_ready()
        most, times = 0.0, []
        while flood.result() is None:
            most = max(most, victim.memory_info().rss - rss)
            begin = time.monotonic()
            yard.machines.status(0)
            times.append(time.monotonic() - begin)
        found = flood.result()
        assert found is not None
        assert found["sent"] >= 300 or found["dialled"] > 3, found
        assert most < MOST_FLOODED, f"{most / 2**20:.0f} MB more"
        # Not the slowest: we may be stopped ourselves. An agent that is busy for a second says so.
        assert statistics.median(times) < 2.0, f"it took {times} s to answer"
        assert yard.machines.status(1).view == view, "nobody was thought dead"
