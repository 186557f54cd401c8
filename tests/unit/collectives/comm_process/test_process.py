"""Communication processes with real listeners and a trust log: guests and removed machines stay outside."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from torch.distributed import TCPStore

from barnraise.agent.cluster.connection_policy import ClusterConnectionPolicy
from barnraise.collectives.comm_process.process import CommProcess
from barnraise.collectives.messages import (
    Alive,
    AskStatistics,
    Command,
    CommProcessReady,
    GroupMember,
    GroupNotOpened,
    GroupOpened,
    Inbox,
    OpenGroup,
    Reply,
    Statistics,
    encode,
)
from barnraise.collectives.rendezvous import _Entry, exchange_members
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.metrics import catalogue
from barnraise.identity import NodeId, NodeKey
from barnraise.identity.trust import TrustLog
from barnraise.runs.participants import trusted_nodes
from barnraise.transport.listener.acceptor import ConnectionRefusal
from barnraise.transport.listener.listener import Listener
from barnraise.transport.listener.preface import Preface

WAIT_S = 60.0
T = TypeVar("T")
DESK, NAS, FRIEND = (NodeKey.generate() for _ in range(3))
LOG = TrustLog.found(DESK, "desk")
LOG = LOG.extended(LOG.admit(DESK, NAS.id, "owner", "nas"))
LOG = LOG.extended(LOG.admit(DESK, FRIEND.id, "guest", "friend"))


class House:
    """The part of an agent that its listener asks. A hostile one trusts every machine of its log."""

    def __init__(self, key: NodeKey, *, hostile: bool) -> None:
        self.key = key
        self.log = LOG
        self._hostile = hostile

    def trusted_for(self, run: str) -> tuple[NodeId, ...]:
        if self._hostile:
            return (self.key.id, *self.log.members)
        return trusted_nodes(self.log, self.key.id, None)

    def pairing_key(self, target: bytes) -> bytes | None:
        return None

    def deliver_pairing(
        self, preface: Preface, connection: socket.socket, address: str
    ) -> ConnectionRefusal | None:
        return ConnectionRefusal("no code is open")

    def deliver_agent(self, preface: Preface, connection: socket.socket, address: str) -> None:
        raise AssertionError("no agent dials here")

    async def answer(self, request: bytes) -> bytes:
        raise AssertionError("no worker asks here")


class Machine:
    """A listener on a loop of its own, and one worker's communication process in a thread."""

    def __init__(self, directory: Path, house: House) -> None:
        self.house = house
        self._settings = Settings(
            state=StateSettings(directory=str(directory)),
            network=NetworkSettings(port=0, addresses=("127.0.0.1",), connect_timeout_s=2.0, retries=1),
        )
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever)
        self._loop_thread.start()
        self.listener = Listener(self._settings, policy=ClusterConnectionPolicy(house))
        self.call(self.listener.start)
        self.channel, inside = socket.socketpair()
        self.channel.settimeout(WAIT_S)
        self._direct, direct_inside = socket.socketpair()
        self._inside = (inside, direct_inside)
        self._inbox = Inbox(commands=False)
        self._replies: list[Command | Reply] = []
        self._process = CommProcess(inside, direct_inside, self._settings, "default", 0)
        self._thread = threading.Thread(target=self._process.serve, daemon=True)
        self._thread.start()
        self.member: GroupMember = self.next(CommProcessReady).member

    def call(self, action: Callable[[], object]) -> None:
        async def perform() -> None:
            result = action()
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(perform(), self._loop).result(WAIT_S)

    def send(self, command: Command) -> None:
        self.channel.sendall(encode(command))

    def next(self, *kinds: type[T]) -> T:
        """Return the next reply of these kinds; heartbeats to the worker are skipped."""
        while True:
            while self._replies:
                reply = self._replies.pop(0)
                if isinstance(reply, kinds):
                    return reply
                assert isinstance(reply, Alive), reply
            self._replies += self._inbox.feed(self.channel.recv(1 << 16))

    def close(self) -> None:
        self.channel.close()
        self._thread.join(WAIT_S)
        self.call(self.listener.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._runner.close()
        self._process._listener.close()  # its process would end now
        for end in (self._direct, *self._inside):
            end.close()

    def links(self) -> float:
        self.send(AskStatistics(1))
        return self.next(Statistics).values[catalogue.LINKS_OPEN.name]


Place = Callable[..., Machine]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made: list[Machine] = []

    def start(key: NodeKey, *, hostile: bool = False) -> Machine:
        made.append(Machine(tmp_path / str(len(made)), House(key, hostile=hostile)))
        return made[-1]

    yield start
    for machine in made:
        machine.close()


def open_group(name: str, *ranks: Machine) -> list[GroupOpened | GroupNotOpened]:
    """Let the machines open a group of these ranks, and return what each of them got."""
    members = tuple(machine.member for machine in ranks)
    for rank, machine in enumerate(ranks):
        machine.send(OpenGroup(1, 0, name, rank, members, 8.0, None))
    return [machine.next(GroupOpened, GroupNotOpened) for machine in ranks]  # type: ignore[type-var]


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(2))  # worker ids are random, and decide which side dials
def test_worker_of_guest_in_the_store_is_not_connected(place: Place, turn: int) -> None:
    """A guest writes its worker as rank 1 into the TCPStore of a group that `barnraise run` did not make."""
    desk, guest = place(DESK), place(FRIEND, hostile=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forged = TCPStore("127.0.0.1", store.port, is_master=False)
    forged.set("barnraise/1", msgspec.msgpack.encode(_Entry(guest.member, "00")))  # type: ignore[arg-type]
    members, nonce = exchange_members(store, 0, 2, desk.member, WAIT_S)
    assert members[1] == guest.member, "the store is open to all: the guest took the rank"
    answers = open_group(nonce, desk, guest)
    assert [type(answer) for answer in answers] == [GroupNotOpened, GroupNotOpened]
    assert desk.links() == 0


@pytest.mark.slow
def test_links_to_removed_machine_are_cut_and_not_made_again(place: Place) -> None:
    """An owner's machine is removed while its worker has a link to a running worker."""
    desk, nas = place(DESK), place(NAS, hostile=True)
    answers = open_group("before", desk, nas)
    assert [type(answer) for answer in answers] == [GroupOpened, GroupOpened]
    assert isinstance(answers[0], GroupOpened)
    assert answers[0].nodes == (NAS.id.raw,)
    assert desk.links() == 1
    without = LOG.extended(LOG.revoke(DESK, NAS.id))
    desk.house.log = without
    desk.call(desk.listener.refresh_trust)
    deadline = time.monotonic() + WAIT_S
    while desk.links():
        assert time.monotonic() < deadline, "the link to the removed machine is still open"
    again = open_group("with the old secret", desk, nas)
    assert [type(answer) for answer in again] == [GroupNotOpened, GroupNotOpened]
    nas.house.log = without  # it learned the new secret from a guest, say
    nas.call(nas.listener.refresh_trust)
    last = open_group("with the new secret", desk, nas)
    assert [type(answer) for answer in last] == [GroupNotOpened, GroupNotOpened]
    assert desk.links() == 0
