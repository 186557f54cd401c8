"""TLS to a server that is slow to show its key."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import pytest

from barnraise.core.errors import HubAway
from barnraise.hub.protocol.tls import PinnedContext, context_for
from barnraise.identity import NodeKey


@pytest.fixture
def silent() -> Iterator[int]:
    """Return the port of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_slow_hub_times_out_instead_of_failing_verification(silent: int) -> None:
    """A certificate error would make people ask for a new invite without need."""
    with pytest.raises(HubAway, match=f"127.0.0.1:{silent} does not answer in time"):
        context_for("127.0.0.1", silent, NodeKey.generate().id, 0.2, pinned=False)


def test_hub_behind_proxy_needs_no_direct_connection(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    context = context_for("127.0.0.1", silent, NodeKey.generate().id, 0.2, pinned=False)
    assert not isinstance(context, PinnedContext)
    assert context.verify_mode == ssl.CERT_REQUIRED


def test_pinned_hub_is_not_asked_for_its_key_first(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other certificate counts, with and without a proxy in the environment."""
    for proxy in ("", "http://127.0.0.1:1"):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        context = context_for("127.0.0.1", silent, NodeKey.generate().id, 0.2, pinned=True)
        assert isinstance(context, PinnedContext)
