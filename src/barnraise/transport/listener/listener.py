"""Listener of a machine: one port for other machines, local sockets for its own processes.

One local socket serves the person's commands. Each run has another one, which knows only that run. Workers
register at a local socket and get their ticket there; they never open a port. A connection with a
valid preface names a worker or another route. It is passed to that worker's communication process, or to the
policy. The listener does no TLS for it and sees none of its bytes. It asks its policy about trust and secrets
each time.

Run it alone (``python -m barnraise.transport.listener.listener``) or inside a process with an asyncio
selector loop. Windows cannot pass the sockets of another loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from barnraise import __version__
from barnraise.core.config import Settings, load_settings, state_directory
from barnraise.core.errors import BarnraiseError, IdentityError, ListenerError, ProtocolError
from barnraise.core.file_lock import FileLock
from barnraise.core.flow.console_log import install_process_log
from barnraise.core.flow.termination import stop_by_signals
from barnraise.identity import WORKER_BYTES, NodeId, delegate
from barnraise.identity.private_file import private_directory
from barnraise.transport.addresses import own_addresses
from barnraise.transport.ipc.fd_passing import IpcChannel, encode_frame
from barnraise.transport.ipc.local_socket import LocalListener, is_same_user
from barnraise.transport.ipc.messages import (
    LARGEST_BODY,
    DialTicket,
    IncomingConnection,
    ListenerReply,
    ListenerRequest,
    ListenerStanding,
    RegisterEndpoint,
    RegistrationRefused,
    Reply,
    Request,
    TrustUpdate,
    decode_request,
    encode_message,
)
from barnraise.transport.listener.acceptor import ConnectionAcceptor, ConnectionRefusal, accept_or_pause
from barnraise.transport.listener.bind import open_port
from barnraise.transport.listener.connection_policy import (
    RESERVED,
    ConnectionPolicy,
    SettingsConnectionPolicy,
)
from barnraise.transport.listener.preface import ROUTE_WORKER, Preface, refuse_route

_MOST_LOCAL = 1024
_PREDECESSOR_S = 3.0
_FIRST_WORKER_S = 30.0
_IDLE_S = 2.0
_MOST_QUESTIONS = 4
_LONGEST_ANSWER_S = 600.0
_TELL_S = 10.0

_log = logging.getLogger(__name__)


class _Interface(NamedTuple):
    """Local socket, and the run that it serves; empty: it serves the person, and every request.

    ``has_secret``: workers get the discovery secret. Those in a sandbox do not: a broker dials for them.
    """

    listener: LocalListener
    run: str
    has_secret: bool = True


class _Local:
    """Connection of a local process, which is a worker once it has registered."""

    __slots__ = ("channel", "interface", "pid", "requests", "run", "talk", "trust", "worker")

    def __init__(self, channel: IpcChannel, interface: _Interface) -> None:
        self.channel = channel
        self.interface = interface
        self.worker: bytes | None = None
        self.run = ""
        self.pid = 0
        self.trust: TrustUpdate | None = None  # what the worker was told last
        self.requests: deque[Request] = deque()  # waiting behind a question; the first is in work
        self.talk: asyncio.Task[None] | None = None


class Listener:
    """Owner of the port and the local socket between ``start`` and ``stop``."""

    def __init__(
        self, settings: Settings, *, any_port: bool = False, policy: ConnectionPolicy | None = None
    ) -> None:
        """Create a listener that is not started yet.

        ``any_port``: use another port if the wanted one is taken. ``policy``: the agent's policy; without one
        the settings decide which nodes to trust.
        """
        self._settings = settings
        self._any_port = any_port
        self._directory = private_directory(state_directory(settings))
        self._agent = policy is not None
        self._policy: ConnectionPolicy = SettingsConnectionPolicy(settings) if policy is None else policy
        self._lock = FileLock(self._directory / "listener.lock")
        self._locals: set[_Local] = set()
        self._workers: dict[bytes, _Local] = {}
        self._occupied, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._keeper: ConnectionAcceptor | None = None
        self._interfaces: dict[str, _Interface] = {}  # by run; the one of the person under an empty name

    @property
    def node(self) -> NodeId:
        return self._policy.key.id

    @property
    def keeper(self) -> ConnectionAcceptor:
        if self._keeper is None:
            raise ListenerError("the listener has not been started")
        return self._keeper

    @property
    def port(self) -> int:
        return self.keeper.port

    @property
    def workers(self) -> int:
        return len(self._workers)

    async def start(self) -> None:
        """Open the port and the local socket; raise ListenerError if another listener has them."""
        self._loop = asyncio.get_running_loop()
        await self._succeed()
        try:
            port_socket = open_port(self._settings.network.port, any_port=self._any_port)
            self._keeper = ConnectionAcceptor(port_socket, self._policy.key_for, self._deliver)
            self._keeper.open()
            self._open_interface("", self._directory)
        except BaseException:
            await self.stop()
            raise
        _log.info(
            "node %s listens on port %d; encryption: %s",
            *(self.node.short, self.port, self._settings.network.encryption),
        )

    async def stop(self) -> None:
        """Close everything; safe to call twice, or without a start."""
        for run in list(self._interfaces):
            self._close_interface(run)
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        talks = [local.talk for local in self._locals if local.talk is not None]
        for local in list(self._locals):
            self._farewell(local)
        if talks:
            await asyncio.wait(talks, timeout=_PREDECESSOR_S)
        self._lock.release()

    def open_run(self, run: str, directory: Path, *, has_secret: bool = True) -> None:
        """Serve the workers of a run at a local socket of their own in ``directory``.

        Every other request than those of this run's workers is rejected there. ``has_secret``: the workers
        get the discovery secret, to dial others themselves.
        """
        self.close_run(run)
        self._open_interface(run, directory, has_secret=has_secret)

    def close_run(self, run: str) -> None:
        """Close the local socket of a run and disconnect the processes that use it."""
        assert run, "the interface of the person closes with the listener"
        if run in self._interfaces:
            interface = self._close_interface(run)
            for local in [local for local in self._locals if local.interface is interface]:
                self._farewell(local)

    def _open_interface(self, run: str, directory: Path, *, has_secret: bool = True) -> None:
        interface = _Interface(LocalListener(directory), run, has_secret)
        self._interfaces[run] = interface
        self._loop.add_reader(interface.listener.socket, self._accept_local, interface)

    def _close_interface(self, run: str) -> _Interface:
        interface = self._interfaces.pop(run)
        self._loop.remove_reader(interface.listener.socket)
        interface.listener.close()
        return interface

    def refresh_trust(self) -> None:
        """Tell every worker what it may trust now, if that has changed since it was told last.

        A worker that does not read its messages now is told at the next call.
        """
        for local in list(self._workers.values()):
            trust = self._trust_for(local, local.run)
            if trust == local.trust:
                continue
            try:
                local.channel.send(encode_message(trust))
                local.trust = trust
            except BlockingIOError:
                continue
            except (BarnraiseError, OSError) as error:
                _log.warning("a worker was disconnected: %s", error)
                self._farewell(local)

    def _trust_for(self, local: _Local, run: str) -> TrustUpdate:
        secret = self._policy.secret() if local.interface.has_secret else b""
        return TrustUpdate([node.raw for node in self._policy.trusted(run)], secret)

    async def wait_until_idle(self, *, first_s: float = _FIRST_WORKER_S, after_s: float = _IDLE_S) -> None:
        """Return once no local process has been connected for a while."""
        patience = first_s
        while True:
            try:
                await asyncio.wait_for(self._occupied.wait(), patience)
            except TimeoutError:
                return
            await self._empty.wait()
            patience = after_s

    async def _succeed(self) -> None:
        """Take over as the only listener of the state directory, after one that is just stopping."""
        deadline = self._loop.time() + _PREDECESSOR_S
        while not self._lock.try_acquire():
            if self._loop.time() > deadline:
                raise ListenerError(
                    f"another listener uses the state directory {self._directory}",
                    hint="Use that one, or stop it first.",
                )
            await asyncio.sleep(0.05)

    def _deliver(self, preface: Preface, connection: socket.socket, address: str) -> ConnectionRefusal | None:
        if preface.route != ROUTE_WORKER:
            return self._deliver_to_house(preface, connection, address)
        local = self._workers.get(preface.target)
        if local is None:
            return ConnectionRefusal(f"no worker {preface.target.hex()[:8]} is registered", refuse_route())
        incoming = IncomingConnection(
            worker=preface.target,
            peer_address=address,
            version_min=preface.version_min,
            version_max=preface.version_max,
            plaintext=preface.plaintext,
        )
        try:
            local.channel.send_socket(encode_message(incoming), connection, local.pid)
        except ListenerError as error:
            self._farewell(local)
            return ConnectionRefusal(error.message)
        except OSError as error:
            return ConnectionRefusal(
                f"worker {preface.target.hex()[:8]} does not accept connections now: {error}"
            )
        return None

    def _deliver_to_house(
        self, preface: Preface, connection: socket.socket, address: str
    ) -> ConnectionRefusal | None:
        try:
            copy = connection.dup()
        except OSError as error:
            return ConnectionRefusal(f"cannot accept connections now: {error.strerror}")
        try:
            copy.setblocking(False)
            refusal = self._policy.deliver(preface, copy, address)
        except BaseException:
            copy.close()
            raise
        if refusal is not None:
            copy.close()
        return refusal

    def _accept_local(self, interface: _Interface) -> None:
        listening = interface.listener.socket
        connection = accept_or_pause(self._loop, listening, partial(self._accept_local, interface))
        if connection is None:
            return
        # Workers of one run must not take the places of the person's commands and of other runs.
        taken = sum(local.interface is interface for local in self._locals)
        if taken >= _MOST_LOCAL or not is_same_user(connection):
            connection.close()
            return
        local = _Local(IpcChannel(connection), interface)
        self._locals.add(local)
        self._occupied.set()
        self._empty.clear()
        self._loop.add_reader(connection, self._read_local, local)

    def _read_local(self, local: _Local) -> None:
        try:
            while (delivery := local.channel.receive()) is not None:
                self._take(local, decode_request(delivery.message))
        except (BarnraiseError, OSError) as error:
            _log.warning("a local process was disconnected: %s", error)
            self._farewell(local)
            return
        if local.channel.closed:
            self._farewell(local)

    def _take(self, local: _Local, request: Request) -> None:
        """Answer at once, or after the earlier requests of this process."""
        token = local.interface.listener.token
        if not secrets.compare_digest(request.token.encode(), token.encode()):
            raise ProtocolError("a local process showed a wrong token")
        if local.talk is None and not isinstance(request, ListenerRequest):
            local.channel.send(encode_message(self._reply(local, request)))
            return
        if len(local.requests) >= _MOST_QUESTIONS:
            raise ProtocolError("a local process sends too many requests")
        local.requests.append(request)
        if local.talk is None:
            local.talk = self._loop.create_task(self._converse(local))

    async def _converse(self, local: _Local) -> None:
        try:
            while local.requests:
                request = local.requests[0]
                if isinstance(request, ListenerRequest) and local.worker is None:
                    frame = encode_frame(encode_message(await self._tell(local, request)))
                    sending = self._loop.sock_sendall(local.channel.connection, frame)
                    await asyncio.wait_for(sending, _TELL_S)
                else:
                    local.channel.send(encode_message(self._reply(local, request)))
                local.requests.popleft()
            local.talk = None
        except (BarnraiseError, OSError) as error:
            _log.warning("a local process was disconnected: %s", error)
            self._farewell(local)

    async def _tell(self, local: _Local, request: ListenerRequest) -> Reply:
        answering = self._policy.answer(request.question, local.interface.run)
        try:
            answer = await asyncio.wait_for(answering, _LONGEST_ANSWER_S)
        except BarnraiseError as error:
            return RegistrationRefused(error.message, error.hint, error.code)
        except TimeoutError:
            return RegistrationRefused(
                f"the agent did not answer within {_LONGEST_ANSWER_S:g} s", "Ask again."
            )
        except Exception as error:  # noqa: BLE001  # our fault at one question must not end the agent
            _log.exception("a question could not be answered")
            return RegistrationRefused(
                f"the agent failed with {type(error).__name__}", "Read the agent's log."
            )
        if len(answer) > LARGEST_BODY:
            return RegistrationRefused(
                f"the answer has {len(answer)} bytes, too many to send", "Ask for less."
            )
        return ListenerReply(answer)

    def _reply(self, local: _Local, request: Request) -> Reply:
        if isinstance(request, ListenerRequest):
            return RegistrationRefused(
                "this connection belongs to a worker", "Open another one for questions."
            )
        if not isinstance(request, RegisterEndpoint):
            return self._standing()
        if local.worker is not None:
            return RegistrationRefused(
                "this connection has a worker already", "Open a connection for each worker."
            )
        if request.run.startswith(RESERVED):
            return RegistrationRefused(
                f"a run's name cannot begin with {RESERVED}", "Choose another name for the run."
            )
        own_run = local.interface.run
        if own_run and request.run != own_run:
            return RegistrationRefused(
                f"this local interface serves workers of run {own_run} only, not of {request.run!r}",
                "Use the run name that BARNRAISE_RUN gives.",
            )
        why = self._policy.refuse_run(request.run)
        if why is not None:
            return RegistrationRefused(why, "See what runs are known here: barnraise status")
        try:
            return self._register(local, request)
        except IdentityError as error:
            return RegistrationRefused(error.message, error.hint)

    def _register(self, local: _Local, request: RegisterEndpoint) -> DialTicket:
        worker = secrets.token_bytes(WORKER_BYTES)
        trust = self._trust_for(local, request.run)
        ticket = DialTicket(
            credentials=delegate(self._policy.key, run=request.run, worker=worker),
            trusted=trust.trusted,
            secret=trust.secret,
            run=request.run,
            generation=request.generation,
            worker=worker,
            port=self.port,
            addresses=self._addresses(),
            encryption=self._settings.network.encryption,
            listener_version=__version__,
        )
        local.worker, local.run, local.pid, local.trust = worker, request.run, request.pid, trust
        self._workers[worker] = local
        _log.info("worker %s of run %r is registered (pid %d)", worker.hex()[:8], request.run, request.pid)
        return ticket

    def _standing(self) -> ListenerStanding:
        return ListenerStanding(
            node=self.node.raw,
            port=self.port,
            addresses=self._addresses(),
            encryption=self._settings.network.encryption,
            workers=len(self._workers),
            pid=os.getpid(),
            listener_version=__version__,
            agent=self._agent,
        )

    def _addresses(self) -> list[str]:
        # Asked each time: a laptop changes its network while the listener runs.
        return list(self._settings.network.addresses) or own_addresses()

    def _farewell(self, local: _Local) -> None:
        if local not in self._locals:
            return
        self._locals.discard(local)
        if not self._locals:
            self._occupied.clear()
            self._empty.set()
        if local.worker is not None:
            del self._workers[local.worker]
            _log.info("worker %s of run %r has left", local.worker.hex()[:8], local.run)
        self._loop.remove_reader(local.channel.fileno())
        if local.talk is None:
            local.channel.close()
        else:
            # The channel closes only when the loop has let go of what was being sent there.
            local.talk.add_done_callback(lambda _: local.channel.close())
            local.talk.cancel()


def serve(settings: Settings, *, until_idle: bool = False) -> int:
    """Listen until a signal, or until the last worker has left; return the exit code."""

    async def run() -> None:
        listener = Listener(settings, any_port=until_idle)
        await listener.start()
        leave = asyncio.Event()
        stop_by_signals(asyncio.get_running_loop(), leave.set)
        waits: list[asyncio.Future[object]] = [asyncio.ensure_future(leave.wait())]
        if until_idle:
            waits.append(asyncio.ensure_future(listener.wait_until_idle()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await listener.stop()
            _log.info("the listener has ended")

    # Not the default loop of Windows: a socket that it has touched cannot be handed over.
    with (
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
        contextlib.suppress(KeyboardInterrupt),
    ):
        runner.run(run())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the listener from the command line."""
    parser = argparse.ArgumentParser(
        prog="barnraise-listener", description="Listen for this machine's workers."
    )
    parser.add_argument("--state-directory", help="where the node key and the local socket are")
    parser.add_argument("--port", type=int, help="TCP port (0: any free one)")
    parser.add_argument("--until-idle", action="store_true", help="stop soon after the last worker has left")
    parser.add_argument("--settings", help="complete settings as JSON, instead of file and environment")
    options = parser.parse_args(arguments)
    install_process_log()
    try:
        if options.settings is not None:
            settings = msgspec.json.decode(options.settings, type=Settings)
        else:
            given = {"state.directory": options.state_directory} if options.state_directory else {}
            settings = load_settings(overrides=given)
        if options.port is not None:
            network = msgspec.structs.replace(settings.network, port=options.port)
            settings = msgspec.structs.replace(settings, network=network)
        return serve(settings, until_idle=options.until_idle)
    except (BarnraiseError, msgspec.DecodeError) as error:
        _log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
