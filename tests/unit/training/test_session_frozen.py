"""Sessions with a frozen base: what is saved, sent and compared, and what the script changes later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from barnraise.checkpoint.__main__ import export
from barnraise.checkpoint.files import CheckpointInfo, Checkpoints
from barnraise.checkpoint.serialization import FlatState, byte_view, shapes
from barnraise.core.errors import CollectiveError, RunError
from barnraise.identity import NodeKey
from barnraise.runs.checkpoint_manifest import CheckpointSignature, sign
from barnraise.training.group.single import SingleWorkerManager
from barnraise.training.recovery.live_recovery import CommittedStep, JoiningWorker, StateDonor
from barnraise.training.state.checkpoint_manager import CheckpointLocations, CheckpointManager
from barnraise.training.steps.throughput import Throughput
from barnraise.training.sync import Sync
from tests.unit.training.adapted_model import Tuning, assert_equal_models, make_model
from tests.unit.training.recovery.test_live_recovery import FakeGroup, FakeRank, _in_thread
from tests.unit.training.steps.test_recovery_failures import HalfHeard
from tests.unit.training.threaded_group import PendingCopy, SharedExchange, ThreadWorker, run_workers

KEY = NodeKey.generate()
RUN = "tune-abcd"


class Signer:
    def sign(self, step: int, fingerprint: bytes) -> CheckpointSignature:
        return sign(KEY, RUN, step, fingerprint)

    def signers(self, run: str) -> Any:
        return {KEY.id.raw}

    def newest(self, given_up: Any, holders: Any) -> Any:
        raise CollectiveError("there is no agent")


class CountingWorker(ThreadWorker):
    """Worker that counts the bytes that it sends to single workers."""

    def __init__(self, exchange: SharedExchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self.sent = 0

    def send_async(self, tensor: torch.Tensor, to: int) -> PendingCopy:
        self.sent += tensor.numel() * tensor.element_size()
        return super().send_async(tensor, to)


@pytest.fixture(autouse=True)
def _equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Throughput, "speed", lambda self: 1.0)


def _copy(parts: FlatState) -> FlatState:
    return FlatState(parts.skeleton, [tensor.clone() for tensor in parts.tensors])


def _bytes(parts: FlatState) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in parts.tensors)


# sizes


def test_checkpoint_has_size_of_trained_parameters(tmp_path: Path) -> None:
    tuning = Tuning(SingleWorkerManager()).train(2)
    checkpoints = Checkpoints(tmp_path / "checkpoints", RUN, Signer())  # type: ignore[arg-type]
    checkpoints.save(tuning.state.flatten(2), CheckpointInfo(2, 1, False))
    checkpoints.wait()
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    base = sum(tensor.numel() * tensor.element_size() for tensor in tuning.net.state_dict().values())
    assert tuning.trained_bytes < size <= 1.1 * tuning.trained_bytes < base / 2
    facts: Any = export(tmp_path / "checkpoints", RUN, tmp_path / "out", Signer())  # type: ignore[arg-type]
    assert facts["base_tensors"] == 12
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert set(exported) == {f"{layer}.{part}.weight" for layer in range(6) for part in ("down", "up")}


def test_blocking_transfer_has_size_of_trained_parameters() -> None:
    """The adapters differ at the start, the bases do not."""

    def member(worker: ThreadWorker) -> tuple[Tuning, int]:
        counting = CountingWorker(worker._exchange, worker.rank)
        net = make_model()
        with torch.no_grad():
            net[0].up.weight.add_(worker.rank)  # type: ignore[union-attr,operator]
        tuning = Tuning(counting, net)
        return tuning.train(3), counting.sent

    (first, sent), (second, _) = run_workers(2, member)
    assert_equal_models(first.net, second.net)
    assert 0 < sent <= 1.1 * first.trained_bytes
    assert first.state.window_digest(5) == second.state.window_digest(5)


def test_live_recovery_has_size_of_trained_parameters_when_donor_dies() -> None:
    """The snapshot comes from two donors, of which one dies; later steps are replayed."""
    half = Tuning(SingleWorkerManager())
    results: list[CommittedStep] = []
    half.run._step_loop._recovery.note_commit = lambda result: results.append(result())  # type: ignore[method-assign]
    half.train_flat(2)
    donors = [StateDonor(half.state.flatten(2), 2) for _ in range(2)]
    assert all(_bytes(donor._snapshot) <= 1.1 * half.trained_bytes for donor in donors)
    half.train_flat(4)
    for donor in donors:
        for result in results[2:]:
            donor.note_commit(result)
    late, joining = Tuning(SingleWorkerManager()), JoiningWorker()
    load, replay = late.run._step_loop._load_state, late.run._step_loop._replay

    def recover(group: FakeGroup) -> None:
        joining.recover(FakeRank(group, group.world - 1), late.state.max_bytes, load, replay, lambda: None)

    broken = FakeGroup(training_world=2)
    donors[0].start(lambda: FakeRank(broken, 0))
    donors[1].start(lambda: FakeRank(broken, 1, dies_after=4))  # type: ignore[arg-type]
    with pytest.raises(CollectiveError):
        recover(broken)
    group = FakeGroup(training_world=1)
    donors[0].start(lambda: FakeRank(group, 0))
    donors[0].finish()
    thread = _in_thread(lambda: recover(group))
    thread.join(60)
    assert joining.done == 4
    assert joining.stats is not None
    assert joining.stats.bytes <= 1.1 * half.trained_bytes
    assert_equal_models(half.net, late.net)
    assert late.state.fingerprint(4, is_full=True) == half.state.fingerprint(4, is_full=True)


def test_limit_admits_state_with_whole_model_and_not_more() -> None:
    tuning = Tuning(SingleWorkerManager()).train(1)
    own = _bytes(tuning.state.flatten(1))
    base = sum(tensor.numel() * tensor.element_size() for tensor in tuning.net.state_dict().values())
    assert own + base < tuning.state.max_bytes <= 8 * own + base + (64 << 20)


# another base


@pytest.mark.parametrize("layer", [0, 3])
def test_other_base_is_named_with_machine(layer: int) -> None:
    def member(worker: ThreadWorker) -> Tuning:
        worker.name_of = lambda rank: ("mac", "pc")[rank]  # type: ignore[method-assign]
        net = make_model()
        if worker.rank:
            net[layer].base.weight.data[7, 7] += 1e-9  # type: ignore[union-attr,index]
        return Tuning(worker, net).train(1)

    with pytest.raises(RunError) as caught:
        run_workers(2, member)
    assert caught.value.message == f"{layer}.base.weight differs from that of mac"
    assert "may-differ" in caught.value.hint


def test_base_that_may_differ_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """One machine stores a layer of the base in half precision."""

    def member(worker: ThreadWorker) -> Tuning:
        net = make_model()
        if worker.rank:
            weight = net[0].base.weight  # type: ignore[union-attr]
            weight.data = weight.data.to(torch.bfloat16).double()  # type: ignore[union-attr,operator]
        return Tuning(worker, net, base_may_differ=True).train(3)

    first, second = run_workers(2, member)
    for name, tensor in first.net.state_dict().items():
        assert torch.equal(tensor, second.net.state_dict()[name]) == (name != "0.base.weight"), name
    assert "depend on which machine computes which samples" in caplog.text


def test_worker_that_trains_more_is_named() -> None:
    def member(worker: ThreadWorker) -> Tuning:
        net = make_model()
        net[2].base.bias.requires_grad_(worker.rank == 1)  # type: ignore[union-attr,operator]
        return Tuning(worker, net).train(1)

    with pytest.raises(RunError, match=r"2\.base\.bias is trained here, but frozen on"):
        run_workers(2, member)


def test_joining_worker_with_other_base_is_rejected_before_it_loads() -> None:
    half = Tuning(SingleWorkerManager()).train_flat(2)
    late = Tuning(SingleWorkerManager(), make_model(seed=5))
    before = late.weights()
    with pytest.raises(RunError, match=r"0.base.bias, 0.base.weight, 1.base.bias and 9 more tensors differ"):
        late.state.load(half.state.flatten(2), "pc")
    for name, tensor in late.net.state_dict().items():
        assert torch.equal(tensor, before[name])


# what changes later


def _average(tuning: Tuning) -> None:
    """Move a frozen tensor, as a moving average of a teacher does."""
    with torch.no_grad():
        tuning.net[1].base.weight.lerp_(tuning.net[0].base.weight, 0.1)  # type: ignore[union-attr,arg-type]


def _average_uncounted(tuning: Tuning) -> None:
    tuning.net[1].base.weight.data.mul_(0.9)  # type: ignore[union-attr,operator]


def _replace(tuning: Tuning) -> None:
    weight = tuning.net[1].base.weight.detach() + 1  # type: ignore[union-attr,operator]
    tuning.net[1].base.weight = torch.nn.Parameter(weight, requires_grad=False)  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [_average, _average_uncounted, _replace])
def test_frozen_tensor_that_script_changes_becomes_state(change: Any) -> None:
    """It is in the checkpoint of the same commit, and reaches a worker that joins."""

    def member(worker: ThreadWorker) -> Tuning:
        tuning = Tuning(worker)
        tuning.run.on_commit(lambda run: change(tuning) if run.done >= 2 else None)
        return tuning.train(4)

    first, second = run_workers(2, member)
    assert first.state.base.moved == second.state.base.moved == {"1.base.weight"}
    late = Tuning(SingleWorkerManager())
    late.state.load(_copy(first.state.flatten(4)), "pc")
    assert_equal_models(late.net, first.net)
    assert late.state.base.moved == {"1.base.weight"}
    assert late.state.fingerprint(4, is_full=True) == first.state.fingerprint(4, is_full=True)


def test_tensor_changed_in_rounds_becomes_state() -> None:
    """With local steps the votes follow whole rounds."""

    def member(worker: ThreadWorker) -> Tuning:
        tuning = Tuning(worker, sync=Sync(period=2, momentum=0.0))
        tuning.run.on_commit(lambda run: _average(tuning) if run.done >= 4 else None)
        return tuning.train(8)

    first, second = run_workers(2, member)
    assert first.state.base.moved == second.state.base.moved == {"1.base.weight"}
    assert first.run.state_digest() == second.run.state_digest()


def test_worker_that_changes_base_alone_is_named() -> None:
    def member(worker: ThreadWorker) -> Tuning:
        worker.name_of = lambda rank: ("mac", "pc")[rank]  # type: ignore[method-assign]
        return Tuning(worker).train(4, lambda tuning: _average(tuning) if worker.rank else None)

    with pytest.raises(RunError, match=r"1\.base\.weight changed on pc after prepare, but not on mac"):
        run_workers(2, member)


def test_base_that_is_moved_and_written_back_stays_base() -> None:
    """As a script does that evaluates on another device: same contents, other memory."""
    tuning = Tuning(SingleWorkerManager()).train(1)
    tuning.state.base.hashes()  # wait: what moves before it is hashed becomes state
    for parameter in tuning.net.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.clone()
    assert _bytes(tuning.train(2).state.flatten(2)) <= 1.1 * tuning.trained_bytes
    assert tuning.state.base.moved == set()


def test_change_while_snapshot_is_replayed_differs_in_fingerprint() -> None:
    """Replay does not call the script, so the state is sent again when the worker joins."""
    half = Tuning(SingleWorkerManager())
    results: list[CommittedStep] = []
    half.run._step_loop._recovery.note_commit = lambda result: results.append(result())  # type: ignore[method-assign]
    half.train_flat(2)
    snapshot = _copy(half.state.flatten(2))
    _average(half)
    half.train_flat(3)
    late = Tuning(SingleWorkerManager())
    late.run._step_loop._load_state(snapshot)
    *_, last = results
    late.run._step_loop._replay(
        msgspec.structs.replace(last, tensors=[byte_view(tensor) for tensor in last.tensors])
    )
    assert late.state.fingerprint(3, is_full=False) != half.state.fingerprint(3, is_full=False)
    late.state.load(_copy(half.state.flatten(3)))
    assert_equal_models(late.net, half.net)


def test_state_without_own_changed_tensor_is_rejected() -> None:
    """As after a change in provisional steps that were dropped: the base of this process is gone."""
    late = Tuning(SingleWorkerManager()).train_flat(1)
    _average(late)
    late.train_flat(2)
    other = Tuning(SingleWorkerManager()).train_flat(1)
    with pytest.raises(RunError, match=r"1\.base\.weight was changed here, but not on pc"):
        late.state.load(_copy(other.state.flatten(1)), "pc")


def test_votes_heard_by_some_keep_state_sets_equal() -> None:
    """The group fails while a tensor becomes state; all workers continue with the same set."""

    def member(worker: ThreadWorker) -> Tuning:
        tuning = Tuning(HalfHeard(worker._exchange, worker.rank))
        tuning.run.on_commit(lambda run: _average(tuning) if run.done == 4 else None)
        return tuning.train(8)

    members = run_workers(3, member)
    assert members[1].run._manager.met > 1  # type: ignore[attr-defined]
    for other in members[1:]:
        assert_equal_models(members[0].net, other.net)
        assert other.state.base.moved == {"1.base.weight"}


# checkpoints of other trainings


def _manager(folder: Path) -> CheckpointManager:
    checkpoints = Checkpoints(folder / "checkpoints", RUN, Signer())  # type: ignore[arg-type]
    return CheckpointManager(CheckpointLocations((checkpoints,), Signer(), folder / "note"), 1e9, 1)  # type: ignore[arg-type]


def _saved(tuning: Tuning, done: int) -> FlatState:
    parts = _copy(tuning.state.flatten(done))
    assert shapes(parts.skeleton)
    return parts


def test_checkpoint_of_training_with_fewer_parameters_is_continued() -> None:
    """The checkpoint has only the hash of what is trained now; it starts from the base, as it must."""
    parts = _saved(Tuning(SingleWorkerManager(), everything=True).train_flat(2), 2)
    net = make_model()
    net[2].base.requires_grad_(True)  # type: ignore[union-attr,operator]
    more = Tuning(SingleWorkerManager(), net, everything=True)
    assert more.state.load(parts, "the checkpoint of step 2", is_checkpoint=True) == 2
    assert "2.base.weight" not in more.state.base.names
    other = make_model(seed=5)
    other[2].base.requires_grad_(True)  # type: ignore[union-attr,operator]
    with pytest.raises(RunError, match="from those of the checkpoint of step 2"):
        Tuning(SingleWorkerManager(), other, everything=True).state.load(
            parts, "the checkpoint of step 2", is_checkpoint=True
        )


def test_checkpoint_of_training_with_more_parameters_keeps_what_was_trained() -> None:
    net = make_model()
    net[2].base.requires_grad_(True)  # type: ignore[union-attr,operator]
    more = Tuning(SingleWorkerManager(), net, everything=True).train_flat(2)
    fewer = Tuning(SingleWorkerManager(), everything=True)
    fewer.state.load(_saved(more, 2), "the checkpoint of step 2", is_checkpoint=True)
    assert_equal_models(fewer.net, more.net)
    assert fewer.state.base.moved == {"2.base.weight", "2.base.bias"}


def test_checkpoint_with_whole_model_leaves_base_frozen() -> None:
    """Earlier versions saved everything."""
    tuning = Tuning(SingleWorkerManager()).train_flat(2)
    names, tuning.state.base.names = tuning.state.base.names, set()
    tuning.state.base.describe = lambda: None  # type: ignore[method-assign]
    late = Tuning(SingleWorkerManager())
    late.state.load(_saved(tuning, 2), "the checkpoint of step 2", is_checkpoint=True)
    assert_equal_models(late.net, tuning.net)
    assert late.state.base.names == names
    assert late.state.base.moved == set()


# run.save


def test_saved_file_has_trained_parameters_and_hashes(tmp_path: Path) -> None:
    tuning = Tuning(SingleWorkerManager()).train(2)
    tuning.run.save(tmp_path / "tuned.safetensors")
    tuning.run.save(tmp_path / "whole.safetensors", complete=True)
    with safe_open(tmp_path / "tuned.safetensors", "pt") as file:
        hashes = json.loads(file.metadata()["base"])
    assert set(hashes) | set(load_file(tmp_path / "tuned.safetensors")) == set(tuning.net.state_dict())
    assert (tmp_path / "tuned.safetensors").stat().st_size <= 1.1 * tuning.trained_bytes
    fresh = make_model()
    fresh.load_state_dict(load_file(tmp_path / "tuned.safetensors"), strict=False)
    assert_equal_models(fresh, tuning.net)
    whole = make_model(seed=9)
    whole.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    assert_equal_models(whole, tuning.net)


def test_model_without_frozen_parameters_has_no_base(tmp_path: Path) -> None:
    net = make_model().requires_grad_(True)
    net.register_buffer("mask", torch.ones(3000, dtype=torch.float64))
    tuning = Tuning(SingleWorkerManager(), net).train(2)
    assert not tuning.state.base.names
    assert tuning.state.base._thread is None, "nothing is hashed"
    tuning.run.save(tmp_path / "model.safetensors")
    assert set(load_file(tmp_path / "model.safetensors")) == set(net.state_dict())
