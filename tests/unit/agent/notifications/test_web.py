"""Notices over HTTP, sent to real servers on loopback."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from barnraise.agent.notifications.web import post, web_request
from barnraise.agent_client.notifications.targets import NtfyTarget, WebhookTarget
from tests.notice_servers import certificate, http_target
from tests.unit.agent.notifications.test_notice import notice


def test_webhook_gets_json_with_the_token() -> None:
    with http_target() as server:
        assert post(WebhookTarget(f"{server.url}/hook?x=1", "t0ken"), notice()).failure == ""
    (received,) = server.received
    assert received.path == "/hook?x=1"
    assert received.headers["Authorization"] == "Bearer t0ken"
    assert received.headers["Content-Type"] == "application/json"
    assert json.loads(received.body) == notice().to_json()


def test_ntfy_gets_title_and_text_in_any_script() -> None:
    changed = replace(notice(), event="machine-gone", lost_machine="büro", reason="büro antwortet nicht")
    with http_target() as server:
        assert post(NtfyTarget(f"{server.url}/topic"), changed).failure == ""
    (received,) = server.received
    assert received.headers["Title"] == "Barnraise: b?ro is gone from train-k3f9"
    assert received.headers["Priority"] == "high"
    assert received.body.decode() == "büro antwortet nicht"
    assert "Authorization" not in received.headers


def test_title_for_ntfy_has_no_encoded_word() -> None:
    """An ntfy server decodes them, and its text may then have line ends."""
    changed = replace(notice(), event="machine-gone", lost_machine="=?utf-8?q?a=0Ab?=")
    request = web_request(NtfyTarget("https://ntfy.sh/x"), changed)
    assert request.get_header("Title") == "Barnraise: = ?utf-8?q?a=0Ab?= is gone from train-k3f9"


def test_done_run_is_not_urgent() -> None:
    request = web_request(NtfyTarget("https://ntfy.sh/x"), notice(event="done", state="done"))
    assert request.get_header("Priority") == "default"
    assert request.get_method() == "POST"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_not_followed(status: int) -> None:
    with http_target() as other, http_target([status], redirect=f"{other.url}/elsewhere") as server:
        result = post(WebhookTarget(f"{server.url}/hook", "t0ken"), notice())
    assert result.is_final
    assert str(status) in result.failure
    assert other.received == []
    assert len(server.received) == 1


@pytest.mark.parametrize(("status", "is_final"), [(404, True), (503, False)])
def test_refusal_names_the_status_and_no_address(status: int, is_final: bool) -> None:
    with http_target([status]) as server:
        result = post(WebhookTarget(f"{server.url}/S3CRET"), notice())
    assert (result.failure, result.is_final) == (f"the server answered {status}", is_final)


def test_server_that_is_off_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = post(WebhookTarget(f"http://127.0.0.1:{port}/S3CRET"), notice())
    assert not result.is_final
    assert result.failure == "the server cannot be reached: Connection refused"


def test_answer_that_is_not_http_quotes_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(b"S3CRET nonsense\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        result = post(WebhookTarget(f"http://127.0.0.1:{listener.getsockname()[1]}/S3CRET"), notice())
    assert result.failure.startswith("the request failed: ")
    assert "S3CRET" not in result.failure


def test_certificate_must_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, context = certificate(tmp_path)
    with http_target(tls=context) as server:
        refused = post(WebhookTarget(f"{server.url}/hook"), notice())
        assert refused.failure.startswith("the certificate of the server is not valid")
        assert server.received == []
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        assert post(WebhookTarget(f"{server.url}/hook"), notice()).failure == ""
        # The certificate is for 127.0.0.1.
        other = post(WebhookTarget(f"{server.url.replace('127.0.0.1', 'localhost')}/hook"), notice())
        assert other.failure == "the certificate of the server is not valid: it is for another name"
    assert len(server.received) == 1
