"""Sharded checkpoints of real ranks, each with its own folder: machines are lost, files are damaged."""

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
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from barnraise.agent_client.run_requests import GuestRow, RolesResponse
from barnraise.checkpoint import shard_exchange
from barnraise.checkpoint.offline.__main__ import reshard
from barnraise.checkpoint.serialization import tensor_bytes
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
from barnraise.core.errors import BarnraiseError, CheckpointError, RunError

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
        """Return the hashes of all full tensors and numbers."""
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        tensors = dict(model)
        for name, values in optimizer["state"].items():
            tensors |= {f"{name}.{key}": value for key, value in values.items()}
        hashed = {name: blake3(tensor_bytes(value)).hexdigest() for name, value in tensors.items()}
        return hashed | {"groups": repr(optimizer["param_groups"])}


def save(folder: str, steps: Sequence[int], copies: int = 2) -> Digests:
    training = Training(0)
    for step in steps:
        training = Training(step)
        save_sharded({"training": training}, folder, step, copies=copies)
    return training.digests()


def save_while_training(folder: str, step: int) -> Digests:
    """Save in the background, and change the state meanwhile: the checkpoint has that of the call."""
    training = Training(step)
    expected = training.digests()
    handle = save_sharded({"training": training}, folder, step, is_async=True)
    while True:
        training.model(torch.randn(4, 7)).square().mean().backward()
        training.optimizer.step()
        if torch_all_agree(handle.done()):
            break
    handle.wait(60.0)
    assert handle.done()
    return expected


def torch_all_agree(own: bool) -> bool:
    """Return True once it is true on all ranks, which also uses the program's group."""
    if not dist.is_initialized():
        return own
    count = torch.tensor(float(own))
    dist.all_reduce(count)
    return int(count) == dist.get_world_size()


def save_twice_in_background(folder: str) -> tuple[str, Digests]:
    """Return the error of the first save, which a later one does not hide, and what the second has saved."""
    first = save_sharded({"training": {"model": {"strange": _Unsaveable()}}}, folder, 1, is_async=True)
    training = Training(2)
    save_sharded({"training": training}, folder, 2, is_async=True).wait(60.0)
    assert first.done()
    try:
        first.wait(1.0)
    except CheckpointError as error:
        return error.message, training.digests()
    return "", training.digests()


class _Unsaveable:
    """Value that can be copied, and fails when it is written."""

    def __deepcopy__(self, memory: object) -> _Unsaveable:
        return self

    def __reduce__(self) -> str:
        raise RuntimeError("this cannot be written")


def load(folder: str) -> tuple[int | None, Digests]:
    training = Training(999)
    step = load_sharded({"training": training}, folder)
    return step, training.digests()


def load_another_model(folder: str) -> None:
    load_sharded({"training": {"model": {"strange": torch.zeros(3)}}}, folder)


def save_another_step(folder: str) -> None:
    save_sharded({}, folder, dist.get_rank())


def serve(rank: int, line: Connection) -> None:
    """Run each requested function in a new group, until there is no more request."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    register()
    while (request := line.recv()) is not None:
        name, world, backend, store, arguments = request
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


class RankProcesses:
    """Three rank processes that persist. Each keeps its rank, because torch caches meshes."""

    def __init__(self, room: Path) -> None:
        # torch is imported once for all, where the system lets processes fork
        has_forks = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if has_forks else "spawn")
        if has_forks:
            context.set_forkserver_preload([serve.__module__])
        self._room, self._calls = room, 0
        self._lines, self._processes = [], []
        for rank in range(RANKS):
            own_end, worker_end = context.Pipe()
            process = context.Process(target=serve, args=(rank, worker_end), daemon=True)
            process.start()
            self._lines.append(own_end)
            self._processes.append(process)

    def call(self, name: str, folders: Sequence[Path], backend: str = "gloo", **arguments: Any) -> list[Any]:
        """Run a function on as many ranks as there are folders, and return their results."""
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
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    made = RankProcesses(tmp_path_factory.mktemp("stores"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def saved(
    processes: RankProcesses, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Digests, Digests]:
    """Save steps 3 and 6 on three machines, and return their contents; `machines` copies them."""
    room = tmp_path_factory.mktemp("saved")
    folders = [room / str(rank) for rank in range(RANKS)]
    three = processes.call("save", folders, steps=[3])[0]
    six = processes.call("save", folders, steps=[6])[0]
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
def test_sharded_checkpoint_survives_loss_of_any_machine(
    processes: RankProcesses, machines: list[Path], saved: tuple[Path, Digests, Digests], lost: int
) -> None:
    shutil.rmtree(machines[lost])
    assert processes.call("load", machines[:lost] + machines[lost + 1 :]) == [(6, saved[2])] * 2


def test_sharded_checkpoint_works_on_own_backend(
    processes: RankProcesses, saved: tuple[Path, Digests, Digests], tmp_path: Path
) -> None:
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    assert processes.call("save", folders, "barnraise", steps=[6])[0] == saved[2]
    shutil.rmtree(folders[0])
    assert processes.call("load", folders[1:], "barnraise") == [(6, saved[2])] * 2


def test_machine_with_copies_only_fetches_needed_files(
    processes: RankProcesses, machines: list[Path], saved: tuple[Path, Digests, Digests]
) -> None:
    assert [shards(machine, 6) for machine in machines] == [
        ["__0_0.distcp", "__2_0.distcp"],
        ["__0_0.distcp", "__1_0.distcp"],
        ["__1_0.distcp", "__2_0.distcp"],
    ]
    shutil.rmtree(machines[1])  # it came back with an empty disk
    assert processes.call("load", machines) == [(6, saved[2])] * 3
    assert shards(machines[1], 6) == ["__0_0.distcp", "__1_0.distcp"]
    assert shards(machines[0], 6) == ["__0_0.distcp", "__2_0.distcp"], "it needs nothing more"


def test_loss_of_two_machines_is_reported(
    processes: RankProcesses, machines: list[Path], saved: tuple[Path, Digests, Digests], tmp_path: Path
) -> None:
    assert processes.call("load", machines[:1])[0][0] is None
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    processes.call("save", folders, steps=[6], copies=3)
    assert processes.call("load", folders[1:2]) == [(6, saved[2])]


def test_ranks_sharing_folder_are_one_machine(
    processes: RankProcesses, saved: tuple[Path, Digests, Digests], tmp_path: Path
) -> None:
    big, small = tmp_path / "big", tmp_path / "small"
    processes.call("save", [big, big, small], steps=[6])
    assert shards(big, 6) == shards(small, 6) == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    shutil.rmtree(big)
    assert processes.call("load", [small, small]) == [(6, saved[2])] * 2


def test_only_last_two_checkpoints_are_kept(processes: RankProcesses, machines: list[Path]) -> None:
    (machines[1] / ".draft-0123").mkdir()  # of one that was killed
    processes.call("save", machines, steps=[9])
    for machine in machines:
        assert sorted(os.listdir(machine)) == ["step-00000006", "step-00000009"]


# damage


def test_truncated_shard_file_makes_checkpoint_skipped(
    processes: RankProcesses, machines: list[Path], saved: tuple[Path, Digests, Digests]
) -> None:
    """This simulates a power cut before two of three machines had finished."""
    (machines[0] / "step-00000006").rename(machines[0] / ".draft-1")
    (machines[1] / "step-00000006" / "manifest.json").write_bytes(b'{"format":1,"st')
    assert processes.call("load", machines) == [(3, saved[1])] * 3
    processes.call("save", machines, steps=[5])
    kept = [sorted(os.listdir(machine)) for machine in machines]
    assert kept[0] == kept[2] == ["step-00000003", "step-00000005"], "what is torn does not count as kept"


def test_changed_byte_is_detected_and_copy_used(
    processes: RankProcesses, machines: list[Path], saved: tuple[Path, Digests, Digests]
) -> None:
    change_a_byte(machines[1] / "step-00000006" / "__1_0.distcp")
    assert processes.call("load", machines) == [(6, saved[2])] * 3
    assert (machines[1] / "step-00000006" / ".bad-__1_0.distcp").exists()
    assert shards(machines[1], 6) == ["__0_0.distcp", "__1_0.distcp"], "it was brought again"


def test_older_checkpoint_is_used_if_both_copies_changed(
    processes: RankProcesses, machines: list[Path], saved: tuple[Path, Digests, Digests]
) -> None:
    for machine in machines[:2]:
        change_a_byte(machine / "step-00000006" / "__0_0.distcp")
    assert processes.call("load", machines) == [(3, saved[1])] * 3


def test_failure_on_one_rank_is_raised_on_all(
    processes: RankProcesses, machines: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    answers = processes.call("save", [*machines[:2], tmp_path / "file" / "x"], steps=[9])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].startswith("rank 2: ")
    assert sorted(os.listdir(machines[0])) == ["step-00000003", "step-00000006"]


def test_other_model_is_rejected_on_all_ranks(processes: RankProcesses, machines: list[Path]) -> None:
    for answer in processes.call("load_another_model", machines):
        assert answer.startswith("step 6 cannot be loaded: rank 0: ")
        assert "strange" in answer


def test_ranks_saving_different_steps_are_rejected(processes: RankProcesses, machines: list[Path]) -> None:
    assert {answer[:33] for answer in processes.call("save_another_step", machines)} == {
        "rank 0 calls save with step 0 and"
    }


def test_metadata_contains_no_pickled_path(machines: list[Path]) -> None:
    """A path of a Linux machine cannot be unpickled on Windows."""
    assert b"PosixPath" not in (machines[0] / "step-00000006" / ".metadata").read_bytes()


# on the disk, without a program


def test_parts_of_two_machines_become_shards_of_two_ranks(
    processes: RankProcesses, machines: list[Path], saved: tuple[Path, Digests, Digests], tmp_path: Path
) -> None:
    facts = reshard(machines[:2], tmp_path / "new", count=2, step=None, is_one_file=False, prefix="")
    assert facts["step"] == 6
    assert shards(tmp_path / "new", 6) == ["__0_0.distcp", "__1_0.distcp"]
    assert processes.call("load", [tmp_path / "new", tmp_path / "other"]) == [(6, saved[2])] * 2


def test_parts_become_one_file_with_the_whole_model(
    machines: list[Path], saved: tuple[Path, Digests, Digests], tmp_path: Path
) -> None:
    reshard(machines, tmp_path, count=1, step=3, is_one_file=True, prefix="training.model.")
    tensors = load_file(tmp_path / "model.safetensors")
    hashed = {name: blake3(tensor_bytes(value)).hexdigest() for name, value in tensors.items()}
    assert sorted(hashed) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert hashed == {name: saved[1][name] for name in hashed}


def test_missing_and_damaged_parts_are_not_used(machines: list[Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"count": 1, "step": None, "is_one_file": False, "prefix": ""}
    with pytest.raises(CheckpointError, match=r"no folder has a valid copy of __1_0\.distcp"):
        reshard(machines[:1], tmp_path / "new", **options)
    change_a_byte(machines[1] / "step-00000006" / "__1_0.distcp")
    assert reshard(machines[:2], tmp_path / "new", **options)["step"] == 3, "the newest whole one"


# in the background


@pytest.mark.parametrize("backend", ["gloo", "barnraise"])
def test_save_in_background_has_the_state_of_its_call(
    processes: RankProcesses, tmp_path: Path, backend: str
) -> None:
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    expected = processes.call("save_while_training", folders, backend, step=4)
    assert expected[0] == expected[1] == expected[2]
    shutil.rmtree(folders[1])
    assert processes.call("load", [folders[0], folders[2]]) == [(4, expected[0])] * 2


def test_failure_in_background_is_raised_by_its_handle(processes: RankProcesses, tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    answers = processes.call("save_twice_in_background", folders)
    assert all("this cannot be written" in message for message, _ in answers)
    assert processes.call("load", folders) == [(2, answers[0][1])] * RANKS


# one process


def test_sharded_checkpoint_works_without_group(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it is alone
        expected = save(str(tmp_path), [3])
        assert load(str(tmp_path)) == (3, expected)


def test_save_in_background_works_without_group(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = save_while_training(str(tmp_path), 4)
        assert load(str(tmp_path)) == (4, expected)


def test_relative_folder_is_placed_in_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_CHECKPOINTS", str(tmp_path / "run" / "checkpoints"))
    assert load_sharded({}, "mine") is None
    assert (tmp_path / "run" / "checkpoints" / "sharded" / "mine").is_dir()
    assert load_sharded({}, tmp_path / "elsewhere") is None
    assert (tmp_path / "elsewhere").is_dir()


def test_resumed_run_links_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_group_with_guest_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_LAUNCHED", "1")
    monkeypatch.setenv("BARNRAISE_RUN", "train-abcd")
    mac, lap, away = b"\1" * 32, b"\2" * 32, b"\3" * 32
    guests = (GuestRow(lap, "lap", True), GuestRow(away, "away", False))
    known = RolesResponse(here=mac, owners=(mac,), guests=guests)
    monkeypatch.setattr(shard_exchange, "ask_roles", lambda settings, run, launched: known)
    for call in (lambda: save_sharded({}, tmp_path / "x", 1), lambda: load_sharded({}, tmp_path / "x")):
        with pytest.raises(RunError, match="lap takes part as a guest"):
            call()
    assert not (tmp_path / "x").exists()


# what follows from what


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8), st.data())
def test_copies_cover_every_file_after_losses(counts: list[int], copies: int, data: st.DataObject) -> None:
    """For any ``copies - 1`` lost machines, the others can send each other all files."""
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
    remaining = [own for place, own in enumerate(has) if place not in lost]
    numbers = [[number for number, file in enumerate(files) if file.name in own] for own in remaining]
    shards = FoundShards(ShardManifest(step=1, start=0, files=files), b"", []).held_by(numbers)
    assert shards.missing == []
    names = st.sets(st.sampled_from([file.name for file in files]))
    wanted = [data.draw(names) for _ in remaining]
    for (source, to), moved in plan_missing_files(shards, wanted).items():
        assert source != to
        assert {file.name for file in moved} <= remaining[source]
        remaining[to] |= {file.name for file in moved}
    assert all(wanted[place] <= remaining[place] for place in range(len(remaining)))
