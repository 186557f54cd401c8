"""A hub process and its members over real HTTP: from the invite to equal bits."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509 import load_der_x509_certificate
from safetensors.torch import load_file

from barnraise.core.errors import HubError
from barnraise.hub.__main__ import run
from barnraise.hub.mirror.handover import sign_handover, take_over
from barnraise.hub.private_options import PrivateOptions
from barnraise.hub.protocol.invites import invite_text
from barnraise.hub.protocol.messages import HubDataOrder
from barnraise.hub.protocol.tls import server_context
from barnraise.hub.server.server import ListenOptions, bind_listener, running_hub, serve
from barnraise.hub.storage.create import create_hub, hub_key
from barnraise.hub.storage.export import export_model
from barnraise.hub.storage.log import LogReplica
from barnraise.identity import NodeId, NodeKey
from tests.unit.hub.hub_process import LAYOUT, TERMS, Friend, HubProcess, Refused, plainly

LATER = 1 << 40
COURSE = HubDataOrder(samples=1000, batch=10, seed=7)


@pytest.fixture
def friends() -> Iterator[list[Friend]]:
    members: list[Friend] = []
    yield members
    for friend in members:
        friend.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path / "hub")
    process.start()
    try:
        yield process
    finally:
        process.kill()


def test_friends_reach_same_bits(hub: HubProcess, friends: list[Friend], tmp_path: Path) -> None:
    invite = hub.invite(uses=2)
    friends += [Friend(hub.address, invite.hub_id, key) for key in (hub.owner, None, None, None)]
    owner, first, second, late = friends
    assert first.join(invite, "ann").role == "friend"
    assert second.join(invite, "bob").description.layout is None
    with pytest.raises(Refused, match="no-base"):
        first.lease()
    with pytest.raises(Refused, match="only the owner"):
        first.push_base(torch.zeros(LAYOUT.numel), COURSE)

    torch.manual_seed(1)
    base = torch.randn(LAYOUT.numel)
    assert owner.push_base(base, COURSE).accepted
    first.pull(tmp_path)
    assert torch.equal(first.state, base)
    second.pull(tmp_path)
    expected, velocity = base.clone(), torch.zeros_like(base)
    for number in range(1, 5):
        first_lease, second_lease = first.lease(), second.lease()
        assert first_lease.version == second_lease.version == number - 1
        assert (first_lease.members, second_lease.members) == ((1 if number == 1 else 2), 2), (
            "as in the round before"
        )
        changes = [torch.randn(LAYOUT.numel) * 0.1 for _ in range(2)]
        assert first.push(first_lease, changes[0]).weight == first_lease.samples
        second.push(second_lease, changes[1])
        assert first.pull(tmp_path).version == number
        second.pull(tmp_path)
        assert torch.equal(first.state, second.state)
        gradient = (changes[0] * first_lease.samples + changes[1] * second_lease.samples) / (
            first_lease.samples + second_lease.samples
        )
        velocity = TERMS.momentum * velocity + gradient
        expected -= TERMS.rate * (gradient + TERMS.momentum * velocity)
        assert torch.allclose(first.state, expected, atol=0.01)
    late.pull(tmp_path)
    assert torch.equal(late.state, first.state), "a base on the way holds the same bits"
    assert export_model(hub.directory, tmp_path / "out") == first.version
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert [tuple(model[entry.name].shape) for entry in LAYOUT.entries] == [(40, 128), (77,)]
    assert torch.equal(torch.cat([model[entry.name].reshape(-1) for entry in LAYOUT.entries]), first.state)


def test_export_before_base_is_refused(hub: HubProcess, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="no model yet"):
        export_model(hub.directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mirror_takes_over_with_signed_handover(
    hub: HubProcess, friends: list[Friend], tmp_path: Path
) -> None:
    invite, copying = hub.invite(uses=2), hub.invite(role="mirror")
    friends += [Friend(hub.address, invite.hub_id, key) for key in (hub.owner, None)]
    owner, ann = friends
    owner.push_base(torch.randn(LAYOUT.numel), COURSE)
    ann.join(invite)
    ann.pull(tmp_path)
    ann.push(ann.lease(), torch.randn(LAYOUT.numel))
    ann.pull(tmp_path)
    with pytest.raises(Refused, match="only a mirror"):
        ann.ask("GET", "/v1/replica", LogReplica)
    held = ann.lease()
    second = HubProcess(tmp_path / "mirror", None)
    try:
        second.start(private=PrivateOptions(follow=invite_text(copying)))
        head = plainly(f"{second.address}/v1/head").json()
        assert head["version"] == 1
        for _, _, name, size, *_ in head["steps"]:
            assert len(plainly(f"{second.address}/v1/blobs/{name}").content) == size
        assert plainly(f"{second.address}/v1/leases", method="POST").status_code == 404, "it only shows"
        hub.kill()
        second.kill()
        # The hub is away, but there is something to serve.
        second.start(private=PrivateOptions(follow=invite_text(copying)))
        assert plainly(f"{second.address}/v1/head").json()["version"] == 1
        successor = hub_key(second.directory).id
        with pytest.raises(HubError, match="another process"):
            take_over(second.directory, sign_handover(hub.owner, invite.hub_id, successor, 1, LATER), 2.0)
        second.kill()
        with pytest.raises(HubError, match="mirror"):
            asyncio.run(serve(second.directory, ListenOptions("127.0.0.1", 0, plain=True)))
        for key, heir in ((NodeKey.generate(), successor), (hub.owner, NodeKey.generate().id)):
            with pytest.raises(HubError):
                take_over(second.directory, sign_handover(key, invite.hub_id, heir, 1, LATER), 2.0)
        take_over(second.directory, sign_handover(hub.owner, invite.hub_id, successor, 1, LATER), 2.0)
        with pytest.raises(RuntimeError, match="has taken over"):
            second.start(private=PrivateOptions(follow=invite_text(copying)))
        second.start()
        friends.append(moved := Friend(second.address, successor, ann.key))
        moved.pull(tmp_path)
        assert torch.equal(moved.state, ann.state)
        assert moved.lease().spans == held.spans, "leases go on, too"
    finally:
        second.kill()


def test_hub_serves_tls_with_key_of_invites(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running_hub(tmp_path) as (_, app):
            config = uvicorn.Config(app, log_level="warning", lifespan="off")
            context = server_context(tmp_path, hub_key(tmp_path))
            config.ssl_context_factory = lambda *_: context
            server = uvicorn.Server(config)
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                listener.listen()
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                try:
                    await asyncio.to_thread(_check_key, listener.getsockname()[1], hub_key(tmp_path).id)
                finally:
                    server.should_exit = True
                    await serving

    create_hub(tmp_path, "fireside", NodeKey.generate().id, TERMS)
    asyncio.run(scene())


def _check_key(port: int, hub: NodeId) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as line,
        context.wrap_socket(line) as secured,
    ):
        assert secured.version() == "TLSv1.3"
        data = secured.getpeercert(binary_form=True)
        assert data is not None
        key = load_der_x509_certificate(data).public_key()
        assert isinstance(key, Ed25519PublicKey)
        assert key.public_bytes_raw() == hub.raw


def test_small_responses_are_sent_without_delay() -> None:
    async def scene() -> None:
        nodelay = asyncio.get_running_loop().create_future()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            nodelay.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind_listener(ListenOptions("127.0.0.1", 0))
        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await nodelay
            writer.close()

    asyncio.run(scene())


def test_hub_without_tls_listens_on_loopback_only(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="TLS"):
        run(tmp_path, ListenOptions("0.0.0.0", 0, plain=True))
