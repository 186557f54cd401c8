"""Hub client over a failing line: which responses count, and which requests may be repeated."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from barnraise.core.errors import HubAway, HubError, HubRefused, RunError
from barnraise.core.flow.retry import ReportedBackoff
from barnraise.hub.client.client import HubClient
from barnraise.hub.client.contributor import Contributor
from barnraise.hub.client.credentials import (
    MemberCredentials,
    credentials_text,
    member_key,
    member_secret,
    parse_credentials,
    read_credentials,
    write_credentials,
)
from barnraise.hub.client.name_resolution import Target
from barnraise.hub.protocol.messages import (
    HubDataOrder,
    Lease,
    LeaseRequest,
    Problem,
    RunDescription,
    VectorEntry,
    VectorLayout,
    VersionHead,
)
from barnraise.hub.protocol.tls import PinnedContext
from barnraise.identity.keys import NodeKey, private_pem
from barnraise.identity.node_id import NodeId
from tests.unit.hub.client.fake_hub import (
    FakeHub,
    changed,
    denied,
    longer,
    lost_answer,
    no_connection,
    proxys_page,
    streamed,
)
from tests.unit.hub.reverse_proxies import make_certificates

LAYOUT = VectorLayout((VectorEntry("weight", (50, 60), "float32"), VectorEntry("bias", (60,), "float32")))
COURSE = HubDataOrder(samples=100, batch=8, epochs=4)


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    room = tmp_path / "hub"
    room.mkdir()
    return FakeHub(room)


def client_of(hub: FakeHub, **more: Any) -> HubClient:
    settings: dict[str, Any] = {"transport": hub.transport, "sleep": lambda seconds: None, **more}
    return HubClient(["http://hub.test"], hub.key.id, NodeKey.generate(), **settings)


def owner(hub: FakeHub, room: Path, **more: Any) -> Contributor:
    return Contributor(client_of(hub, **more), room, is_owner=True, metered=lambda: False)


# answers


def test_response_of_another_key_is_rejected(hub: FakeHub) -> None:
    client = HubClient(
        ["http://hub.test"], NodeKey.generate().id, NodeKey.generate(), transport=hub.transport
    )
    with pytest.raises(HubAway, match="not signed with the key of the invite"):
        client.ask("GET", "/v1/run", RunDescription)


def test_unsigned_response_is_rejected(hub: FakeHub) -> None:
    hub.signs = False
    with pytest.raises(HubAway, match="answered 200"):
        client_of(hub).ask("GET", "/v1/run", RunDescription)


def test_response_to_another_request_is_rejected(hub: FakeHub) -> None:
    client, kept = client_of(hub), []
    hub.faults = [lambda request, answer: kept.append(answer()) or kept[0], lambda request, answer: kept[0]]
    client.ask("GET", "/v1/run", RunDescription)
    with pytest.raises(HubAway):
        client.ask("GET", "/v1/run", RunDescription)


def test_wrong_clock_is_corrected_once(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, clock_ahead_s=5000.0)
    client = client_of(hub)
    client.ask("GET", "/v1/run", RunDescription)
    client.ask("GET", "/v1/run", RunDescription)
    assert len(hub.requests) == 3


def test_hub_clock_is_read_from_responses(hub: FakeHub) -> None:
    for behind in (300.0, 100.0):  # too far for the hub, and not
        client = client_of(hub, wall=lambda late=behind: time.time() - late)
        client.ask("GET", "/v1/run", RunDescription)
        assert client.ahead_s is not None
        assert abs(client.ahead_s - behind) < 30


def test_second_address_is_used_and_remembered(hub: FakeHub) -> None:
    client = HubClient(
        ["http://one.test", "http://two.test"], hub.key.id, NodeKey.generate(), transport=hub.transport
    )
    hub.faults = [no_connection, None]
    client.ask("GET", "/v1/run", RunDescription)
    assert client.address == "http://two.test"


def test_hub_below_proxy_path_gets_requests_there(hub: FakeHub) -> None:
    client = HubClient(["http://hub.test/fireside"], hub.key.id, NodeKey.generate(), transport=hub.transport)

    def strip(request: Any, answer: Any) -> Any:
        request.url = request.url.copy_with(path=request.url.path.removeprefix("/fireside"))
        return answer()

    hub.faults = [strip]
    assert client.ask("GET", "/v1/run", RunDescription).name == "test"


def test_retries_outlast_crash_and_report_wait(hub: FakeHub) -> None:
    messages: list[str] = []
    hub.faults = [no_connection, proxys_page, lost_answer, None]
    client_of(hub, say=messages.append).ask_with_retries("GET", "/v1/run", RunDescription)
    assert len(hub.requests) == 4
    now = [0.0]
    waiting = ReportedBackoff(
        "the hub at X", messages.append, lambda s: now.__setitem__(0, now[0] + s), lambda: now[0]
    )
    for _ in range(12):
        waiting.pause("it is asleep")
    assert messages
    assert "for the hub at X: it is asleep" in messages[0]
    assert len(messages) <= 1 + now[0] / 60


def test_retries_with_busy_hub_time_out(hub: FakeHub) -> None:
    busy = Problem(kind="disk", message="the disk is full", hint="Later.", retry_s=0.01)
    hub.refuse = [(503, busy)] * 50
    with pytest.raises(HubRefused, match="disk is full"):
        client_of(hub).ask_with_retries("POST", "/v1/leave", RunDescription, patience_s=0.0)
    assert len(hub.refuse) > 40


def test_refusal_carries_message_of_hub(hub: FakeHub) -> None:
    hub.refuse = [(403, Problem(kind="quarantined", message="three refusals", hint="Ask the owner."))]
    with pytest.raises(HubRefused, match="three refusals") as caught:
        client_of(hub).ask_with_retries("POST", "/v1/leases", RunDescription)
    assert (caught.value.status, caught.value.kind) == (403, "quarantined")


def test_hub_messages_are_sanitized_for_terminal(hub: FakeHub) -> None:
    hub.refuse = [(403, Problem(kind="role", message="no\x1b[2J\nbarnraise: all is well", hint="a\rb"))]
    with pytest.raises(HubRefused) as caught:
        client_of(hub).ask_with_retries("POST", "/v1/leases", RunDescription)
    assert (caught.value.message, caught.value.hint) == ("no?[2J?barnraise: all is well", "a?b")
    messages: list[str] = []
    now = [0.0]
    waiting = ReportedBackoff(
        "the others", messages.append, lambda s: now.__setitem__(0, now[0] + s), lambda: now[0]
    )
    for _ in range(12):
        waiting.pause("\x1b]0;a title\x07")
    assert messages[0].endswith("for the others: ?]0;a title?")


# rounds


def train(contributor: Contributor, state: torch.Tensor, rounds: int) -> list[torch.Tensor]:
    """Change the state by a different amount in every round; return the updates that were pushed."""
    lease, changes = contributor.start(LAYOUT, COURSE, state), []
    for number in range(rounds):
        assert lease is not None
        change = torch.sin(torch.arange(LAYOUT.numel) * (number + 1.0))
        changes.append(change)
        lease = contributor.exchange(change, state, samples=8, loss=1.0, speed=100.0)
    assert lease is None
    return changes


def test_state_equals_hub_state_after_rounds(hub: FakeHub, tmp_path: Path) -> None:
    begin = torch.randn(LAYOUT.numel)
    state = begin.clone()
    contributor = owner(hub, tmp_path)
    changes = train(contributor, state, 3)
    expected = begin.clone()
    for update in hub.updates:
        expected += -0.5 * update
    assert torch.equal(state, expected)
    assert contributor.contributed == 3
    # Error feedback: what int8 lost of one update is in the next, so the sums agree far better than each.
    lost = (sum(hub.updates) - sum(changes)).abs().max()
    assert float(lost) <= float((hub.updates[0] - changes[0]).abs().max()) * 1.5


@pytest.mark.parametrize("fault", [lost_answer, no_connection, proxys_page, denied, changed, longer])
def test_rounds_are_equal_after_fault_at_any_request(fault: Any, tmp_path: Path) -> None:
    plain = FakeHub(tmp_path / "plain")
    plain.room.mkdir()
    begin = torch.linspace(-1, 1, LAYOUT.numel)
    state = begin.clone()
    train(owner(plain, tmp_path), state, 3)
    for broken in range(0, len(plain.requests), 3):
        hub = FakeHub(tmp_path / f"{fault.__name__}-{broken}")
        hub.room.mkdir()
        hub.faults = [None] * broken + [fault, None, fault]
        other = begin.clone()
        train(owner(hub, tmp_path), other, 3)
        assert len(hub.updates) == 3, broken
        assert torch.equal(state, other), broken


def test_stale_update_is_dropped_with_warning_and_member_continues(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.zeros(LAYOUT.numel)
    contributor = owner(hub, tmp_path)
    contributor.start(LAYOUT, COURSE, state)
    hub.refuse = [(409, Problem(kind="stale", message="the chain is 3 versions further", hint="Pull."))]
    hub.steps.append(
        hub.steps[0].__class__("base", 1, *[getattr(hub.steps[0], f) for f in ("sha256", "size", "codec")])
    )
    assert contributor.exchange(torch.ones(LAYOUT.numel), state, samples=8, loss=None, speed=1.0) is not None
    assert contributor.contributed == 0
    assert "was not accepted: the chain is 3 versions further" in caplog.text


def test_member_of_round_without_version_trains_again(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update was accepted but no version came of it; the hub has samples for its member nevertheless."""
    state = torch.zeros(LAYOUT.numel)
    contributor = owner(hub, tmp_path)
    contributor.start(LAYOUT, COURSE, state)
    waiting = [HubRefused(409, "delivered", "this round already has an update of this member")] * 2
    lease, heads = hub._lease, 0

    def head(after: str | None) -> VersionHead:
        nonlocal heads
        heads += 1
        assert heads < 10, "it waits without end"
        return VersionHead(version=0, steps=())

    def lend(request: LeaseRequest) -> Lease:
        if waiting:
            raise waiting.pop()
        return lease(request)

    monkeypatch.setattr(hub, "_head", head)
    monkeypatch.setattr(hub, "_lease", lend)
    assert contributor.exchange(torch.ones(LAYOUT.numel), state, samples=8, loss=None, speed=1.0) is not None
    assert heads == 3


def test_friend_waits_for_base_of_owner(hub: FakeHub, tmp_path: Path) -> None:
    begun: list[str] = []

    def sleep(seconds: float) -> None:
        if not begun:
            begun.append("owner")
            owner(hub, tmp_path).start(LAYOUT, COURSE, torch.full((LAYOUT.numel,), 7.0))

    friend = Contributor(client_of(hub, sleep=sleep), tmp_path, metered=lambda: False)
    state = torch.zeros(LAYOUT.numel)
    friend.start(LAYOUT, COURSE, state)
    assert torch.equal(state, torch.full((LAYOUT.numel,), 7.0))
    assert hub.requests.count("POST /v1/uploads") == 1


def test_different_model_or_order_is_refused_by_name(hub: FakeHub, tmp_path: Path) -> None:
    owner(hub, tmp_path).start(LAYOUT, COURSE, torch.zeros(LAYOUT.numel))
    other = VectorLayout((VectorEntry("weight", (60, 50), "float32"), LAYOUT.entries[1]))
    with pytest.raises(RunError, match=r"weight \[50, 60\] float32 where this one has weight \[60, 50\]"):
        owner(hub, tmp_path).start(other, COURSE, torch.zeros(LAYOUT.numel))
    with pytest.raises(RunError, match="seed"):
        owner(hub, tmp_path).start(
            LAYOUT, HubDataOrder(samples=100, batch=8, seed=1), torch.zeros(LAYOUT.numel)
        )


def test_leave_returns_lease_and_ignores_errors(hub: FakeHub, tmp_path: Path) -> None:
    contributor = owner(hub, tmp_path)
    contributor.start(LAYOUT, COURSE, torch.zeros(LAYOUT.numel))
    contributor.leave()
    assert hub.left == 1
    contributor.start(LAYOUT, COURSE, torch.zeros(LAYOUT.numel))
    hub.faults = [no_connection]
    contributor.leave()


def test_second_process_of_member_resumes_lease_that_counts_once(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = owner(hub, tmp_path), owner(hub, tmp_path)
    begun, change = torch.zeros(LAYOUT.numel), torch.ones(LAYOUT.numel)
    lease = first.start(LAYOUT, COURSE, begun)
    assert lease is not None
    own_state, other_state = begun.clone(), begun.clone()
    following = first.exchange(change, own_state, samples=8, loss=None, speed=1.0)
    assert float(own_state.max()) < 0
    # The first process dies without a message. The second one of the site has trained equally far.
    second.resume(LAYOUT, COURSE, lease)
    hub.refuse = [(409, Problem(kind="lease-over", message="the lease of this update has ended", hint="."))]
    assert second.exchange(change, other_state, samples=8, loss=None, speed=1.0) == following
    assert torch.equal(own_state, other_state)
    assert len(hub.updates) == 1
    assert "was already delivered or has ended" in caplog.text
    # From now on the second process sends the updates.
    second.exchange(change, other_state, samples=8, loss=None, speed=1.0)
    assert len(hub.updates) == 2


def test_round_leaves_no_files_on_disk(hub: FakeHub, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    train(owner(hub, room), torch.zeros(LAYOUT.numel), 3)
    assert list(room.iterdir()) == []


# blobs


def test_blob_download_resumes_after_break(hub: FakeHub, tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    name = hashlib.sha256(data).hexdigest()
    hub.blobs[name] = data

    def half(request: Any, answer: Any) -> Any:
        response = answer()
        return type(response)(response.status_code, content=response.content[:100_000])

    hub.faults = [half, half, None]
    client_of(hub).fetch(name, tmp_path / "blob", size=len(data))
    assert (tmp_path / "blob").read_bytes() == data
    assert len(hub.requests) == 3


def test_complete_partial_blob_of_dead_process_is_downloaded_again(hub: FakeHub, tmp_path: Path) -> None:
    data = b"whole"
    name = hashlib.sha256(data).hexdigest()
    hub.blobs[name] = data
    (tmp_path / f"{name}.part").write_bytes(data)
    hub.faults = [lambda request, answer: httpx.Response(416), None]
    assert client_of(hub).fetch_bytes(name, 100, tmp_path) == data


def test_blob_with_wrong_content_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.blobs["ab" * 32] = b"something else"
    with pytest.raises(HubError, match="wrong content"):
        client_of(hub).fetch("ab" * 32, tmp_path / "blob", size=14)
    with pytest.raises(HubError, match="larger than declared"):
        client_of(hub).fetch("ab" * 32, tmp_path / "blob", size=3)
    assert list(tmp_path.glob("blob*")) == []


@pytest.mark.parametrize("fault", [denied, changed, longer])
def test_blob_spoiled_at_one_address_is_fetched_from_another(
    hub: FakeHub, tmp_path: Path, fault: Any
) -> None:
    """A cache at one address always returns different content."""
    owner(hub, tmp_path).start(LAYOUT, COURSE, torch.full((LAYOUT.numel,), 7.0))

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "one.test" and request.url.path.startswith("/v1/blobs/"):
            return streamed(fault(request, lambda: hub._answer(request)))
        return streamed(hub._answer(request))

    addresses, pauses = ["http://one.test", "http://two.test"], []
    client = HubClient(
        addresses,
        hub.key.id,
        NodeKey.generate(),
        transport=httpx.MockTransport(handle),
        sleep=lambda seconds: pauses.append(seconds),
    )
    state = torch.zeros(LAYOUT.numel)
    Contributor(client, tmp_path, metered=lambda: False).start(LAYOUT, COURSE, state)
    assert torch.equal(state, torch.full((LAYOUT.numel,), 7.0))
    assert len(pauses) == 1
    assert client.address == "http://two.test"


# seats


def test_machine_has_one_key_per_hub_and_script_gets_only_that(tmp_path: Path) -> None:
    machine, first_hub, second_hub = NodeKey.generate(), NodeKey.generate().id, NodeKey.generate().id
    assert member_key(machine, first_hub).id == member_key(machine, first_hub).id
    assert len({member_key(machine, first_hub).id, member_key(machine, second_hub).id, machine.id}) == 3
    secret = member_secret(machine, first_hub)
    seat = MemberCredentials(
        addresses=("http://hub.test",), hub=first_hub.raw, key=secret, run="test", folder=str(tmp_path)
    )
    write_credentials(seat, tmp_path / "seat")
    credentials = read_credentials(tmp_path / "seat")
    assert credentials.member_key.id == member_key(machine, first_hub).id
    assert (tmp_path / "seat").stat().st_mode & 0o077 == 0
    with pytest.raises(HubError, match="cannot be read"):
        read_credentials(tmp_path / "none")
    assert parse_credentials(credentials_text(seat)) == seat
    for wrong in ("", "not base64!", credentials_text(seat)[:-8]):
        with pytest.raises(HubError, match="cannot be read"):
            parse_credentials(wrong)


# servers


class Server:
    """TLS server with a certificate of a key; answers every request with 204 and its count."""

    def __init__(self, key: NodeKey, folder: Path) -> None:
        now = datetime.datetime(2000, 1, 1)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hub")])
        made = (
            x509.CertificateBuilder(name, name, key.signer.public_key(), 1)
            .not_valid_before(now)
            .not_valid_after(now + datetime.timedelta(days=1))
            .sign(key.signer, None)
        )
        path = folder / "server.pem"
        path.write_bytes(private_pem(key.signer) + made.public_bytes(Encoding.PEM))
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(path)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            link, _ = self._listener.accept()
            with contextlib.suppress(OSError), self._context.wrap_socket(link, server_side=True) as talk:
                while data := talk.recv(4096):
                    self.heard.append(data)
                    talk.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


def ask_once(
    address: str, hub: NodeId, context: ssl.SSLContext | None = None, *, pinned: bool = False
) -> None:
    client = HubClient([address], hub, NodeKey.generate(), pinned=pinned)
    if context is not None:
        client._http_clients[address] = httpx.Client(verify=context, timeout=60)
        client._targets[address] = Target(httpx.URL(address))
    with contextlib.closing(client):
        client.ask("GET", "/v1/run", RunDescription)


def test_server_with_hub_key_is_accepted_with_any_certificate(tmp_path: Path) -> None:
    key = NodeKey.generate()
    server = Server(key, tmp_path)
    with pytest.raises(HubAway, match="answered 204"):  # it was asked, and did not sign
        ask_once(server.address, key.id)
    assert server.heard


def test_server_with_other_key_and_invalid_certificate_gets_no_request(tmp_path: Path) -> None:
    server = Server(NodeKey.generate(), tmp_path)
    with pytest.raises(HubAway, match="CERTIFICATE_VERIFY_FAILED"):
        ask_once(server.address, NodeKey.generate().id)
    assert server.heard == []


def test_valid_certificate_does_not_replace_pinned_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An authority that this machine trusts issued the certificate, for the hub's own name."""
    root, certificate, private = make_certificates()
    for name, data in (("root.pem", root), ("authority-issued.pem", private + certificate)):
        (tmp_path / name).write_bytes(data)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "root.pem"))
    server = Server(NodeKey.generate(), tmp_path)
    server._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server._context.load_cert_chain(tmp_path / "authority-issued.pem")
    address, hub = server.address.replace("127.0.0.1", "localhost"), NodeKey.generate().id
    with pytest.raises(HubAway, match="does not have the hub's key"):
        ask_once(address, hub, pinned=True)
    assert server.heard == []
    with pytest.raises(HubAway, match="answered 204"):
        ask_once(address, hub)
    assert server.heard, "an invite of a hub behind a proxy accepts the proxy's certificate"


def test_server_that_replaced_hub_later_gets_no_request(tmp_path: Path) -> None:
    hub = NodeKey.generate().id
    server = Server(NodeKey.generate(), tmp_path)
    with pytest.raises(HubAway, match="does not have the hub's key"):
        ask_once(server.address, hub, PinnedContext.of(hub))
    assert server.heard == []


def test_hub_behind_sni_proxy_is_pinned_by_key(tmp_path: Path) -> None:
    hub = NodeKey.generate()
    for name in ("hub", "proxy"):
        (tmp_path / name).mkdir()
    behind, server = Server(hub, tmp_path / "hub"), Server(NodeKey.generate(), tmp_path / "proxy")

    def by_name(talk: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        if name == "localhost":
            talk.context = behind._context

    server._context.sni_callback = by_name
    with pytest.raises(HubAway, match="answered 204"):
        ask_once(server.address.replace("127.0.0.1", "localhost"), hub.id, pinned=True)
