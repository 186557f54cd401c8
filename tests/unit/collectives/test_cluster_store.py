"""The cluster store for torch: a store like torch's own, and ranks without any address."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.rendezvous import _rendezvous_handlers, rendezvous

import barnraise
from barnraise.agent_client.kv_client import KvClient, agent_at
from barnraise.agent_client.kv_messages import Namespace
from barnraise.collectives import cluster_store
from barnraise.collectives.cluster_store import ClusterStore, _given
from barnraise.collectives.messages import GroupMember
from barnraise.collectives.rendezvous import exchange_members
from barnraise.collectives.torch_patch.autoload import register
from barnraise.core.errors import ConfigError, ListenerError, OperationTimeout
from tests.unit.kvstore.kv_servers import KvServers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="written with care, not run there yet")

SHORT = timedelta(milliseconds=300)


@pytest.fixture(scope="module")
def servers() -> Iterator[KvServers]:
    with tempfile.TemporaryDirectory(prefix="by-") as directory, KvServers(Path(directory)) as servers:
        yield servers


@pytest.fixture
def store(servers: KvServers, request: pytest.FixtureRequest) -> ClusterStore:
    return make(servers, request.node.name)


def make(servers: KvServers, run: str, timeout: timedelta = timedelta(seconds=60)) -> ClusterStore:
    return ClusterStore(KvClient(agent_at(servers.directories[0]), Namespace(run[:100], 1)), timeout)


def both(store: ClusterStore) -> list[dist.Store]:
    return [store, dist.PrefixStore("prefix", store)]


def test_cluster_store_works_from_python_and_cpp(store: ClusterStore) -> None:
    for number, view in enumerate(both(store)):
        view.set("text", "v")
        view.set("bytes", b"\xff\x00")  # type: ignore[arg-type]
        assert (view.get("text"), view.get("bytes")) == (b"v", b"\xff\x00")
        assert (view.add("n", 2), view.add("n", 3), view.get("n")) == (2, 5, b"5")
        assert view.compare_set("text", "v", "w") == b"w"
        assert view.compare_set("text", "v", "x") == b"w"
        view.append("text", "!")  # type: ignore[attr-defined]
        assert view.multi_get(["text", "n"]) == [b"w!", b"5"]
        view.multi_set(["a", "b"], ["1", "2"])  # type: ignore[attr-defined]
        assert view.check(["a", "b"])
        assert not view.check(["a", "none"])
        view.wait(["a", "b"])
        view.wait(["a", "b"], SHORT)
        assert view.delete_key("a")
        assert not view.delete_key("a")
        assert view.num_keys() == 4 * (number + 1)
        assert view.has_extended_api()  # type: ignore[attr-defined]


def test_queue_push_pop_and_length(store: ClusterStore) -> None:
    store.queue_push("q", "1")
    store.queue_push("q", b"2")
    assert store.queue_len("q") == 2
    assert store.check(["q"])
    assert [store.queue_pop("q"), store.queue_pop("q", block=False)] == [b"1", b"2"]
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", block=False)
    threading.Timer(0.2, store.queue_push, ("q", "late")).start()
    assert store.queue_pop("q") == b"late"


def test_store_errors_are_torch_errors(store: ClusterStore) -> None:
    store.set_timeout(SHORT)
    assert store.timeout == SHORT  # type: ignore[attr-defined]
    waits: list[Callable[[dist.Store], object]] = [
        lambda view: view.get("none"),
        lambda view: view.wait(["none"]),
        lambda view: view.wait(["none"], SHORT),
        lambda view: view.multi_get(["none"]),
    ]
    for view in both(store):
        for wait in waits:
            with pytest.raises(dist.DistStoreError, match="none' did not appear") as caught:
                wait(view)
            assert isinstance(caught.value, RuntimeError)
        view.set("text", "abc")
        with pytest.raises(dist.DistStoreError, match="not a number"):
            view.add("text", 1)
        with pytest.raises(dist.DistStoreError, match="big' has"):
            view.set("big", "x" * (1 << 20))
    with pytest.raises(dist.DistStoreError, match="'empty' did not appear"):
        store.queue_pop("empty")


def test_store_stays_alive_while_torch_holds_it(servers: KvServers) -> None:
    prefixed = dist.PrefixStore("p", make(servers, "lives"))
    copy = prefixed.clone()  # type: ignore[attr-defined]
    gc.collect()
    prefixed.set("k", "v")
    assert copy.get("k") == b"v"


keys = st.sampled_from(["a", "b"])
texts = st.sampled_from(["", "1", "x", "1x"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), keys, texts),
        st.tuples(st.just("append"), keys, texts),
        st.tuples(st.just("add"), st.just("n"), st.integers(-9, 9)),
        st.tuples(st.just("compare_set"), keys, texts, texts),
        st.tuples(st.just("delete_key"), keys),
        st.tuples(st.just("num_keys")),
        st.tuples(st.just("check"), st.lists(keys, max_size=2)),
        st.tuples(st.just("queue_push"), st.just("q"), texts),
        st.tuples(st.just("queue_pop"), st.just("q"), st.just(False)),
        st.tuples(st.just("queue_len"), st.just("q")),
    ),
    max_size=15,
)
names = iter(range(1_000_000))


@given(steps)
@settings(max_examples=40, deadline=None)
def test_cluster_store_behaves_like_torch_store(servers: KvServers, calls: list[tuple[object, ...]]) -> None:
    ours, theirs = make(servers, f"same {next(names)}"), dist.HashStore()
    for name, *fields in calls:
        outcomes = []
        for tested_store in (ours, theirs):
            try:
                outcomes.append(getattr(tested_store, str(name))(*fields))
            except dist.QueueEmptyError:
                outcomes.append("empty")
        assert outcomes[0] == outcomes[1], (name, fields)
    ours._kv.drop()
    cluster_store._alive.remove(ours)


def test_gloo_and_barnraise_groups_form_over_store(servers: KvServers) -> None:
    results: dict[int, float] = {}
    members: dict[int, object] = {}

    def run(rank: int) -> None:
        own = make(servers, "gloo")
        members[rank] = exchange_members(
            own, rank, 3, GroupMember(bytes([rank]) * 16, 1 + rank, ("10.0.0.1",)), 60
        )
        group = dist.ProcessGroupGloo(dist.PrefixStore("g", own), rank, 3, timedelta(seconds=60))
        tensor = torch.tensor([float(rank)])
        group.allreduce([tensor]).wait()
        results[rank] = tensor.item()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert results == {0: 3.0, 1: 3.0, 2: 3.0}
    assert members[0] == members[1] == members[2]


def test_rendezvous_timeout_names_missing_ranks(store: ClusterStore) -> None:
    with pytest.raises(OperationTimeout, match="rank 1 did not call"):
        exchange_members(store, 0, 2, GroupMember(bytes(16), 1, ()), 0.5)


# ranks without an address

USUAL = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "BARNRAISE_RUN",
    "BARNRAISE_WORLD",
    "BARNRAISE_GENERATION",
)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in USUAL:
        monkeypatch.delenv(name, raising=False)
    register()
    return monkeypatch


def test_url_and_environment_set_rank_and_world(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(sys, "argv", ["/home/me/train.py", "--lr"])
    assert _given("env://") == ("train.py", None, None, None)
    assert _given("env://?rank=1&world_size=4") == ("train.py", 1, 4, None)
    assert _given("env://?world_size=-1") == ("train.py", None, None, None)
    assert _given("barnraise://my%20run?generation=5") == ("my run", None, None, 5)
    clean.setenv("BARNRAISE_RUN", "mnist")
    clean.setenv("BARNRAISE_WORLD", "3")
    clean.setenv("RANK", "2")
    assert _given("env://") == ("mnist", 2, 3, None)
    clean.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many'"):
        _given("env://")


def test_env_rendezvous_without_agent_raises_torch_error(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        next(rendezvous("env://"))
    with pytest.raises(ListenerError, match="no listener answers"):
        next(rendezvous("barnraise://"))


def test_env_rendezvous_with_address_does_not_ask_agent(
    clean: pytest.MonkeyPatch, servers: KvServers
) -> None:
    clean.setenv("BARNRAISE_STATE_DIRECTORY", str(servers.directories[0]))
    clean.setattr(cluster_store, "ask_cluster", lambda *_: pytest.fail("it was asked"))
    clean.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        next(rendezvous("env://"))
    clean.setenv("MASTER_PORT", "0")
    store, rank, world = next(rendezvous("env://", 0, 1))
    assert (type(store), rank, world) == (dist.TCPStore, 0, 1)


def test_launcher_ranks_are_kept_with_cluster_store(clean: pytest.MonkeyPatch, servers: KvServers) -> None:
    clean.setenv("BARNRAISE_STATE_DIRECTORY", str(servers.directories[0]))
    clean.setenv("BARNRAISE_GENERATION", "6")
    store, rank, world = next(rendezvous("env://", 2, 3))
    assert isinstance(store, ClusterStore)
    assert (rank, world, store.scope.generation) == (2, 3, 6)
    store, rank, world = next(rendezvous("barnraise://named", 0, 1))
    assert isinstance(store, ClusterStore)
    assert (rank, world, store.scope) == (0, 1, Namespace("named", 6))


def test_registering_twice_wraps_once(clean: pytest.MonkeyPatch) -> None:
    before = _rendezvous_handlers["env"]
    register()
    assert _rendezvous_handlers["env"] is before


SCRIPT = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from barnraise.collectives.torch_patch.autoload import register
from barnraise.collectives.cluster_store import ClusterStore
register()
for again in range(2):
    dist.init_process_group("barnraise", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    inner = dist.distributed_c10d._get_default_store()
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    assert total.item() == world * (world + 1) / 2
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(3, 4)).sum().backward()
    sharded = fully_shard(torch.nn.Linear(4, 2))
    sharded(torch.ones(3, 4)).sum().backward()
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(total, group=gloo)
    dist.barrier()
    print(again, rank, world, isinstance(inner, ClusterStore), inner.scope.generation, flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_form_group_without_address_or_rank(servers: KvServers, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    source = str(Path(barnraise.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name not in USUAL}
    environment |= {
        "BARNRAISE_STATE_DIRECTORY": str(servers.directories[0]),
        "BARNRAISE_WORLD": "2",
        "PYTHONPATH": source,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(tmp_path / "train.py")]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines = []
    for process in processes:
        out, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        lines += [line.split() for line in out.splitlines()]
    for turn in "01":
        group_lines = sorted(line for line in lines if line[0] == turn)
        assert [line[1:4] for line in group_lines] == [["0", "2", "True"], ["1", "2", "True"]]
        assert group_lines[0][4] == group_lines[1][4], "both are in one generation"
    assert len({line[4] for line in lines}) == 2, "the second group is another one"
