"""Sharded checkpoints of real ranks, each with a folder of its own: machines are lost, files are damaged."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from barnraise.agent_client.cluster_requests import NodeRow, StatusResponse
from barnraise.agent_client.run_requests import RunRow, WatchResponse, WorkerRow
from barnraise.checkpoint import shard_exchange
from barnraise.checkpoint.serialization import tensor_bytes
from barnraise.checkpoint.shard_exchange import guest_machines
from barnraise.checkpoint.shard_files import (
    FoundShards,
    ShardFile,
    ShardManifest,
    all_files,
    plan_copies,
    plan_missing_files,
)
from barnraise.checkpoint.sharded import load_sharded, save_sharded
from barnraise.collectives.torch_patch.autoload import register
from barnraise.core.errors import BarnraiseError, RunError

RANKS = 3
Digests = dict[str, str]


# what the ranks do


class Training:
    """A sharded model and its optimizer, after one step."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5))
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 / (seed + 1))
        self.model(torch.randn(4, 7)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def digests(self) -> Digests:
        """Of every full tensor and number."""
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        found = dict(model)
        for name, values in optimizer["state"].items():
            found |= {f"{name}.{key}": value for key, value in values.items()}
        hashed = {name: blake3(tensor_bytes(value)).hexdigest() for name, value in found.items()}
        return hashed | {"groups": repr(optimizer["param_groups"])}


def save(folder: str, steps: Sequence[int], copies: int = 2) -> Digests:
    training = Training(0)
    for step in steps:
        training = Training(step)
        save_sharded({"training": training}, folder, step, copies=copies)
    return training.digests()


def load(folder: str) -> tuple[int | None, Digests]:
    training = Training(999)
    step = load_sharded({"training": training}, folder)
    return step, training.digests()


def load_another_model(folder: str) -> None:
    load_sharded({"training": {"model": {"strange": torch.zeros(3)}}}, folder)


def save_another_step(folder: str) -> None:
    save_sharded({}, folder, dist.get_rank())


def serve(rank: int, line: Connection) -> None:
    """Run what is asked for in a new group each time, until told to leave."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    register()
    while (asked := line.recv()) is not None:
        name, world, backend, store, arguments = asked
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=90),
        )
        try:
            line.send(globals()[name](**arguments))
        except BarnraiseError as error:
            line.send(error.message)
        finally:
            dist.destroy_process_group()


class Crew:
    """Three processes that stay. Each keeps its rank: torch remembers where in a mesh of a size it was."""

    def __init__(self, room: Path) -> None:
        # torch is imported once for all, where the system lets processes fork
        has_forks = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if has_forks else "spawn")
        if has_forks:
            context.set_forkserver_preload([serve.__module__])
        self._room, self._calls = room, 0
        self._lines, self._processes = [], []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            self._lines.append(mine)
            self._processes.append(process)

    def call(self, name: str, folders: Sequence[Path], backend: str = "gloo", **arguments: Any) -> list[Any]:
        """In a group of so many ranks as there are folders; their answers."""
        self._calls += 1
        store, world = str(self._room / f"store-{self._calls}"), len(folders)
        used = list(zip(self._lines, folders, strict=False))
        for line, folder in used:
            line.send((name, world, backend, store, {"folder": str(folder), **arguments}))
        for rank, (line, _) in enumerate(used):
            assert line.poll(150), f"rank {rank} does not answer"
        return [line.recv() for line, _ in used]

    def close(self) -> None:
        for line in self._lines:
            line.send(None)
        for process in self._processes:
            process.join(90)
            assert process.exitcode == 0


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew(tmp_path_factory.mktemp("stores"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def saved(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Digests, Digests]:
    """Steps 3 and 6 on three machines, and what was in them; `machines` makes copies to be damaged."""
    room = tmp_path_factory.mktemp("saved")
    folders = [room / str(rank) for rank in range(RANKS)]
    three = crew.call("save", folders, steps=[3])[0]
    six = crew.call("save", folders, steps=[6])[0]
    assert three != six
    return room, three, six


@pytest.fixture
def machines(saved: tuple[Path, Digests, Digests], tmp_path: Path) -> list[Path]:
    shutil.copytree(saved[0], tmp_path / "machines")
    return [tmp_path / "machines" / str(rank) for rank in range(RANKS)]


def shards(machine: Path, step: int) -> list[str]:
    return sorted(path.name for path in (machine / f"step-{step:08}").glob("__*"))


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# machines


@pytest.mark.parametrize("lost", range(RANKS))
def test_any_machine_may_be_lost(
    crew: Crew, machines: list[Path], saved: tuple[Path, Digests, Digests], lost: int
) -> None:
    shutil.rmtree(machines[lost])
    assert crew.call("load", machines[:lost] + machines[lost + 1 :]) == [(6, saved[2])] * 2


def test_on_our_own_backend(crew: Crew, saved: tuple[Path, Digests, Digests], tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    assert crew.call("save", folders, "barnraise", steps=[6])[0] == saved[2]
    shutil.rmtree(folders[0])
    assert crew.call("load", folders[1:], "barnraise") == [(6, saved[2])] * 2


def test_who_has_only_its_neighbours_files_gets_what_it_reads(
    crew: Crew, machines: list[Path], saved: tuple[Path, Digests, Digests]
) -> None:
    assert [shards(machine, 6) for machine in machines] == [
        ["__0_0.distcp", "__2_0.distcp"],
        ["__0_0.distcp", "__1_0.distcp"],
        ["__1_0.distcp", "__2_0.distcp"],
    ]
    shutil.rmtree(machines[1])  # it came back with an empty disk
    assert crew.call("load", machines) == [(6, saved[2])] * 3
    assert shards(machines[1], 6) == ["__0_0.distcp", "__1_0.distcp"]
    assert shards(machines[0], 6) == ["__0_0.distcp", "__2_0.distcp"], "it needs nothing more"


def test_two_machines_at_once_are_one_too_many(
    crew: Crew, machines: list[Path], saved: tuple[Path, Digests, Digests], tmp_path: Path
) -> None:
    assert crew.call("load", machines[:1])[0][0] is None
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    crew.call("save", folders, steps=[6], copies=3)
    assert crew.call("load", folders[1:2]) == [(6, saved[2])]


def test_ranks_that_share_a_folder_are_one_machine(
    crew: Crew, saved: tuple[Path, Digests, Digests], tmp_path: Path
) -> None:
    big, small = tmp_path / "big", tmp_path / "small"
    crew.call("save", [big, big, small], steps=[6])
    assert shards(big, 6) == shards(small, 6) == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    shutil.rmtree(big)
    assert crew.call("load", [small, small]) == [(6, saved[2])] * 2


def test_the_last_two_are_kept_and_nothing_else_is_left(crew: Crew, machines: list[Path]) -> None:
    (machines[1] / ".draft-0123").mkdir()  # of one that was killed
    crew.call("save", machines, steps=[9])
    for machine in machines:
        assert sorted(os.listdir(machine)) == ["step-00000006", "step-00000009"]


# damage


def test_a_torn_one_is_passed_over(
    crew: Crew, machines: list[Path], saved: tuple[Path, Digests, Digests]
) -> None:
    """As after a power cut while two of three machines had not finished."""
    (machines[0] / "step-00000006").rename(machines[0] / ".draft-1")
    (machines[1] / "step-00000006" / "manifest.json").write_bytes(b'{"format":1,"st')
    assert crew.call("load", machines) == [(3, saved[1])] * 3
    crew.call("save", machines, steps=[5])
    kept = [sorted(os.listdir(machine)) for machine in machines]
    assert kept[0] == kept[2] == ["step-00000003", "step-00000005"], "what is torn does not count as kept"


def test_a_changed_byte_is_found_and_the_copy_counts(
    crew: Crew, machines: list[Path], saved: tuple[Path, Digests, Digests]
) -> None:
    change_a_byte(machines[1] / "step-00000006" / "__1_0.distcp")
    assert crew.call("load", machines) == [(6, saved[2])] * 3
    assert (machines[1] / "step-00000006" / ".bad-__1_0.distcp").exists()
    assert shards(machines[1], 6) == ["__0_0.distcp", "__1_0.distcp"], "it was brought again"


def test_if_both_copies_are_changed_an_older_one_is_taken(
    crew: Crew, machines: list[Path], saved: tuple[Path, Digests, Digests]
) -> None:
    for machine in machines[:2]:
        change_a_byte(machine / "step-00000006" / "__0_0.distcp")
    assert crew.call("load", machines) == [(3, saved[1])] * 3


def test_what_fails_on_one_rank_fails_on_all(crew: Crew, machines: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answers = crew.call("save", [*machines[:2], tmp_path / "file" / "x"], steps=[9])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].startswith("rank 2: ")
    assert sorted(os.listdir(machines[0])) == ["step-00000003", "step-00000006"]


def test_another_model_is_refused_on_all(crew: Crew, machines: list[Path]) -> None:
    for answer in crew.call("load_another_model", machines):
        assert answer.startswith("step 6 cannot be loaded: rank 0: ")
        assert "strange" in answer


def test_ranks_must_save_the_same_step(crew: Crew, machines: list[Path]) -> None:
    assert {answer[:32] for answer in crew.call("save_another_step", machines)} == {
        "rank 0 calls save with step 0 and"
    }


def test_no_path_is_pickled(machines: list[Path]) -> None:
    """That of a Linux machine cannot be unpickled on Windows."""
    assert b"PosixPath" not in (machines[0] / "step-00000006" / ".metadata").read_bytes()


# one process


def test_without_a_group(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it is alone
        expected = save(str(tmp_path), [3])
        assert load(str(tmp_path)) == (3, expected)


def test_in_a_run_a_plain_name_is_a_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARNRAISE_CHECKPOINTS", str(tmp_path / "run" / "checkpoints"))
    assert load_sharded({}, "mine") is None
    assert (tmp_path / "run" / "checkpoints" / "sharded" / "mine").is_dir()
    assert load_sharded({}, tmp_path / "elsewhere") is None
    assert (tmp_path / "elsewhere").is_dir()


def test_a_run_goes_on_with_those_of_the_run_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_run(run: str, *earlier: str) -> None:
        monkeypatch.setenv("BARNRAISE_CHECKPOINTS", str(tmp_path / run / "checkpoints"))
        monkeypatch.setenv("BARNRAISE_RESUMES", ",".join(earlier))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_run("first-aaaa")
        expected = save("mine", [3, 7])
        in_run("third-cccc", "second-bbbb", "first-aaaa")
        assert load("mine") == (7, expected), "the second had none"
        later = save("mine", [9])
        in_run("first-aaaa")
        assert load("mine") == (7, expected), "its own stay"
        in_run("third-cccc", "second-bbbb", "first-aaaa")
        assert load("mine") == (9, later), "the run's own count"


def cluster(**roles: str) -> StatusResponse:
    nodes = tuple(
        NodeRow(node=name, short=name, name=name, role=role, state="here")  # type: ignore[arg-type]
        for name, role in roles.items()
    )
    fixed = dict.fromkeys(("cluster", "sentence", "coordinator", "why_coordinator", "encryption"), "")
    numbers = {"branch": 0, "view": 1, "port": 1, "pid": 1}
    return StatusResponse(
        **fixed,
        **numbers,
        member=True,
        decides=True,
        nodes=nodes,
        links=(),
        version="0",  # type: ignore[arg-type]
    )


def run_on(*names: str) -> WatchResponse:
    row = RunRow(
        run="train-abcd",
        title="",
        command=(),
        by="",
        at=0.0,
        phase="running",
        generation=1,
        version=1,
        sentence="",
        machines=names,
    )
    workers = [
        WorkerRow(rank=rank, name=name, device="cpu", state="running") for rank, name in enumerate(names)
    ]
    return WatchResponse(row=row, parts=(), workers=tuple(workers))


def test_who_is_a_guest() -> None:
    assert guest_machines(run_on("mac", "pc"), cluster(mac="owner", pc="owner", lap="guest")) == []
    assert guest_machines(run_on("mac", "lap"), cluster(mac="owner", lap="guest")) == ["lap"]
    assert guest_machines(run_on("mac", "gone"), cluster(mac="owner")) == ["gone"], "nobody knows it"


def test_a_group_with_a_guest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_LAUNCHED", "1")
    monkeypatch.setenv("BARNRAISE_RUN", "train-abcd")
    told = (run_on("mac", "lap"), cluster(mac="owner", lap="guest"))
    monkeypatch.setattr(shard_exchange, "_ask_agent", lambda run: told)
    for call in (lambda: save_sharded({}, tmp_path / "x", 1), lambda: load_sharded({}, tmp_path / "x")):
        with pytest.raises(RunError, match="lap takes part as a guest"):
            call()
    assert not (tmp_path / "x").exists()


# what follows from what


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8), st.data())
def test_enough_machines_have_every_file(counts: list[int], copies: int, data: st.DataObject) -> None:
    """Whichever ``copies - 1`` machines are lost, the others can bring each other what they want."""
    listed = [
        [ShardFile(f"__{place}_{number}.distcp", 1, "0" * 64) for number in range(count)]
        for place, count in enumerate(counts)
    ]
    listed[0].append(ShardFile(".metadata", 1, "0" * 64))
    files = all_files(listed)
    has = [{file.name for file in own} for own in listed]
    for (_, to), moved in plan_copies(listed, copies).items():
        has[to] |= {file.name for file in moved}
    lost = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=min(copies, len(counts)) - 1))
    left = [own for place, own in enumerate(has) if place not in lost]
    numbers = [[number for number, file in enumerate(files) if file.name in own] for own in left]
    found = FoundShards(ShardManifest(step=1, start=0, files=files), b"", []).held_by(numbers)
    assert found.missing == []
    names = st.sets(st.sampled_from([file.name for file in files]))
    wanted = [data.draw(names) for _ in left]
    for (source, to), moved in plan_missing_files(found, wanted).items():
        assert source != to
        assert {file.name for file in moved} <= left[source]
        left[to] |= {file.name for file in moved}
    assert all(wanted[place] <= left[place] for place in range(len(left)))
