"""Key-value client of a process, through the real local socket of an agent."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent_client import kv_client as kv_client_module
from barnraise.agent_client.kv_client import KvClient, agent_at, ask_cluster
from barnraise.agent_client.kv_messages import (
    LARGEST_VALUE,
    AddToKey,
    ClusterRequest,
    ClusterResponse,
    GetKeys,
    KvDenied,
    KvDone,
    KvRequest,
    KvResponse,
    Namespace,
    SetKey,
    decode_request,
    decode_response,
    encode,
)
from barnraise.core.errors import (
    AgentError,
    BarnraiseError,
    ListenerError,
    MembershipError,
    OperationTimeout,
    ProtocolError,
)
from tests.unit.changed_bytes import changed, read_or_refused
from tests.unit.kvstore.kv_servers import KvServers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="written with care, not run there yet")


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="by-") as directory:  # short, as a socket's path must be
        yield Path(directory)


@pytest.fixture
def servers(root: Path) -> Iterator[KvServers]:
    with KvServers(root) as started:
        yield started


def client(servers: KvServers, machine: int = 0, generation: int = 1) -> KvClient:
    return KvClient(agent_at(servers.directories[machine]), Namespace("test", generation), 60.0)


def test_values_counters_and_queues(servers: KvServers) -> None:
    kv = client(servers)
    assert kv.get("a") is None
    kv.set("a", b"\x00\xff")
    assert kv.get("a") == b"\x00\xff"
    assert [kv.add("n", 5), kv.add("n", -2)] == [5, 3]
    kv.append("a", b"!")
    assert kv.multi_get(["a", "n"]) == [b"\x00\xff!", b"3"]
    assert kv.compare_set("a", b"wrong", b"new") == b"\x00\xff!"
    assert kv.compare_set("c", b"", b"new") == b"new"
    assert kv.missing(["a", "b", "c"]) == ("b",)
    kv.multi_set(["x", "y"], [b"1", b"2"])
    assert kv.count() == 5
    assert kv.delete("x") is True
    assert kv.delete("x") is False
    kv.push("q", b"first")
    kv.push("q", b"second")
    assert kv.length("q") == 2
    assert [kv.pop("q"), kv.pop("q"), kv.pop("q")] == [b"first", b"second", None]
    assert kv.number > 10


def test_waiting_ends_when_the_keys_are_there(servers: KvServers) -> None:
    kv, other = client(servers), client(servers)
    threading.Timer(0.2, lambda: other.multi_set(["k", "l"], [b"1", b"2"])).start()
    kv.wait(["k", "l"], 60)
    assert kv.multi_get(["k", "l"]) == [b"1", b"2"]


def test_wait_for_missing_keys_names_them(servers: KvServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_client_module, "_LAST_LOOK_S", 60.0)  # however slow the agent is at the moment
    kv = client(servers)
    kv.set("here", b"")
    for patience in (0.0, 0.4):
        with pytest.raises(
            OperationTimeout, match=r"\] 'absent' did not appear in start 1 of run 'test'"
        ) as e:
            kv.wait(["here", "absent"], patience)
        assert "'here'" not in e.value.message


def test_long_answers_and_questions_come_in_pieces(servers: KvServers) -> None:
    kv = client(servers)
    keys = [f"key {number}" for number in range(5)]
    values = [bytes([number]) * 400_000 for number in range(5)]
    kv.multi_set(keys, values)
    assert kv.multi_get(keys) == values
    many = [f"{number:04d}" * 200 for number in range(1200)]
    kv.multi_set(many, [b""] * len(many))
    assert kv.missing(many) == ()
    kv.set("largest", bytes(LARGEST_VALUE))
    assert kv.get("largest") == bytes(LARGEST_VALUE)


def test_oversized_value_is_rejected_at_once(servers: KvServers) -> None:
    kv = client(servers)
    with pytest.raises(AgentError, match="'big' has"):
        kv.set("big", bytes(LARGEST_VALUE + 1))
    with pytest.raises(AgentError, match="2000 bytes"):
        kv.set("k" * 2000, b"")
    with pytest.raises(AgentError, match="not valid text"):
        kv.get("\udcff")
    kv.set("text", b"abc")
    with pytest.raises(AgentError, match="not a number"):
        kv.add("text", 1)


def test_stale_generation_is_fenced(servers: KvServers) -> None:
    old, new = client(servers, generation=1), client(servers, generation=2)
    old.set("k", b"old")
    assert new.get("k") is None
    assert old.get("k") == b"old", "a reader alone ends nothing"
    new.set("k", b"new")
    for call in (lambda: old.get("k"), lambda: old.set("k", b""), lambda: old.wait(["k"])):
        with pytest.raises(AgentError, match="start 1 of run 'test' has ended"):
            call()
    new.drop()
    with pytest.raises(AgentError, match="has ended"):
        new.get("k")


def test_threads_do_not_wait_for_each_other(servers: KvServers) -> None:
    kv = client(servers)
    values: list[bytes] = []
    waiter = threading.Thread(target=lambda: values.extend(kv.multi_get(["late"], 60)))
    waiter.start()
    sums: list[int] = []
    counters = [
        threading.Thread(target=lambda: sums.extend(kv.add("n", 1) for _ in range(20))) for _ in range(4)
    ]
    for thread in counters:
        thread.start()
    for thread in counters:
        thread.join(90)
    assert sorted(sums) == list(range(1, 81))
    kv.set("late", b"now")
    waiter.join(90)
    assert values == [b"now"]


def test_lost_connection_reconnects_and_applies_writes_once(servers: KvServers) -> None:
    kv = client(servers)
    assert kv.add("n", 1) == 1
    servers.call(servers.restart_listener(b"node0"))
    assert kv.add("n", 1) == 2
    lost = 0

    class Forgetful:
        """Agent connection that closes before it returns the answer, every other time."""

        def __init__(self) -> None:
            self.real = agent_at(servers.directories[0])()

        def ask(self, question: bytes, timeout: float) -> bytes:
            nonlocal lost
            answer = self.real.ask(question, timeout)
            lost += 1
            if lost % 2:
                self.close()
                raise AgentError("gone") from ConnectionResetError()
            return answer

        def close(self) -> None:
            self.real.close()

    forgetful = KvClient(Forgetful, Namespace("test", 1), 60.0)
    assert [forgetful.add("n", 1) for _ in range(4)] == [3, 4, 5, 6]
    assert lost == 8


def test_call_without_quorum_names_missing_machines(root: Path) -> None:
    with KvServers(root, machines=3) as servers:
        kv = client(servers, machine=0)
        kv.set("k", b"v")
        servers.kill(b"node1")
        servers.kill(b"node2")
        with pytest.raises(MembershipError, match=r"could not get 'k' in time.*waits for node1, node2"):
            kv.get("k", 2.0)


def test_death_of_coordinator_loses_no_keys(root: Path) -> None:
    with KvServers(root, machines=3) as servers:
        kv = client(servers, machine=2)
        kv.set("k", b"v")
        waited: list[bytes] = []
        waiter = threading.Thread(target=lambda: waited.extend(kv.multi_get(["later"], 60)))
        waiter.start()
        assert kv.add("n", 1) == 1
        servers.kill(b"node0")
        counted: list[int] = []
        counting = threading.Thread(target=lambda: counted.append(kv.add("n", 1, 60)))
        counting.start()
        time.sleep(0.3)
        assert not counted, "no machine may answer before there is a new view"
        servers.change_view(b"node1", b"node2")
        counting.join(90)
        assert counted == [2]
        client(servers, machine=1).set("later", b"here")
        waiter.join(90)
        assert waited == [b"here"]
        assert kv.get("k") == b"v"


def test_no_agent_is_an_error_at_the_deadline(root: Path) -> None:
    kv = KvClient(agent_at(root), Namespace("test", 1), 0.5)
    with pytest.raises(MembershipError, match="no listener answers"):
        kv.get("k")
    with pytest.raises(ListenerError):
        ask_cluster(agent_at(root))


def test_refusal_of_agent_is_not_retried(servers: KvServers) -> None:
    servers.mute = True
    before = servers.machines[b"node0"].questions
    with pytest.raises(AgentError, match="being tested"):
        client(servers).get("k")
    assert servers.machines[b"node0"].questions == before + 1


def test_ask_cluster_returns_number_of_machines(servers: KvServers) -> None:
    cluster = ask_cluster(agent_at(servers.directories[0]))
    assert (cluster.world, cluster.node_index, cluster.view) == (1, 0, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_child_opens_own_connections(servers: KvServers) -> None:
    kv = client(servers)
    kv.add("n", 1)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if kv.add("n", 1) == 2 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert kv.add("n", 1) == 3


_HEAD = (Namespace("run", 1), bytes(16), 7, b"founding")
MESSAGES = (
    KvRequest(SetKey(*_HEAD, "key", b"value"), 2.5),
    KvRequest(AddToKey(*_HEAD, "key", -3), 2.5),
    KvRequest(GetKeys(*_HEAD, ("one", "other")), 2.5),
    ClusterRequest(),
    KvResponse(KvDone(5, b"founding", values=(b"value",))),
    KvResponse(KvDenied("lost", "a sentence", "a hint")),
    ClusterResponse(3, 0, 9),
)


@given(st.binary(max_size=200) | changed([encode(message) for message in MESSAGES]))
def test_messages_with_changed_bytes_are_read_or_refused(data: bytes) -> None:
    for decode in (decode_request, decode_response):
        read_or_refused(data, decode, encode, ProtocolError)


def test_messages_with_one_changed_byte_are_both_read_and_refused() -> None:
    """So the test above gets to where fields are read, and not only to the first byte."""
    counts = {True: 0, False: 0}
    for message in map(encode, MESSAGES):
        for place in range(len(message)):
            for change in (1, 128):
                data = bytearray(message)
                data[place] ^= change
                counts[
                    any(_is_read(decode, bytes(data)) for decode in (decode_request, decode_response))
                ] += 1
    assert min(counts.values()) > 100


def _is_read(decode: Callable[[bytes], object], data: bytes) -> bool:
    try:
        decode(data)
    except ProtocolError:
        return False
    return True


def test_ranges_cover_everything_and_fit() -> None:
    sizes = [100_000, 500_000, 1, 2, 600_000, 3]
    parts = list(kv_client_module._parts(sizes))
    assert [place for start, end in parts for place in range(start, end)] == list(range(len(sizes)))
    assert list(kv_client_module._parts([])) == []
    assert issubclass(MembershipError, BarnraiseError)
