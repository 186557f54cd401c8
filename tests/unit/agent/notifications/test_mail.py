"""Notices by e-mail, sent to a real mail server on loopback."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from barnraise.agent.notifications.mail import mail_message, send_mail
from barnraise.agent_client.notifications.targets import EmailTarget
from tests.notice_servers import certificate, mail_target
from tests.unit.agent.notifications.test_notice import notice

PASSWORD = "S3CRET pass"


def target(port: int, **changes: Any) -> EmailTarget:
    fields: dict[str, Any] = {
        "address": "me@home.org",
        "host": "127.0.0.1",
        "port": port,
        "user": "me",
        "password": PASSWORD,
        "sender": "nas@home.org",
    }
    return EmailTarget(**{**fields, **changes})


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path, context = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    return context


def test_mail_arrives_over_tls_after_a_login(trusted: Any) -> None:
    with mail_target(trusted, PASSWORD) as server:
        assert send_mail(target(server.port), notice()).failure == ""
    (message,) = server.messages
    assert message["Subject"] == "Barnraise: train-k3f9 failed"
    assert (message["From"], message["To"]) == ("nas@home.org", "me@home.org")
    assert message["Message-ID"] == f"<{notice().id}@barnraise.invalid>"
    assert message.get_content().startswith("train-k3f9 failed: rank 1 on h1 exited with code 1")
    assert server.recipients == ["<me@home.org>"]
    assert [line.split(" ")[0].upper() for line in server.clear] == ["EHLO", "STARTTLS"]


def test_server_without_tls_gets_neither_password_nor_mail(trusted: Any) -> None:
    with mail_target(trusted, PASSWORD, has_tls=False) as server:
        result = send_mail(target(server.port), notice())
    assert result.is_final
    assert "no TLS" in result.failure
    assert all(line.upper().startswith(("EHLO", "QUIT")) for line in server.clear)


def test_server_with_a_certificate_of_another_gets_no_password(tmp_path: Path) -> None:
    _, context = certificate(tmp_path)
    with mail_target(context, PASSWORD) as server:
        result = send_mail(target(server.port), notice())
    assert result.failure.startswith("the certificate of the mail server is not valid")
    assert not result.is_final
    assert server.messages == []


def test_name_of_the_server_is_not_quoted(trusted: Any) -> None:
    """The certificate is for 127.0.0.1."""
    with mail_target(trusted, PASSWORD) as server:
        result = send_mail(target(server.port, host="localhost"), notice())
    assert result.failure == "the certificate of the mail server is not valid: it is for another name"


def test_wrong_password_is_not_tried_again(trusted: Any) -> None:
    with mail_target(trusted, "another") as server:
        result = send_mail(target(server.port), notice())
    assert (result.failure, result.is_final) == ("the mail server refused the login with 535", True)


@pytest.mark.parametrize(("answer", "is_final"), [("450 busy S3CRET", False), ("550 unknown S3CRET", True)])
def test_refused_address_is_tried_again_if_that_is_temporary(
    trusted: Any, answer: str, is_final: bool
) -> None:
    with mail_target(trusted, PASSWORD, refusals=[answer]) as server:
        result = send_mail(target(server.port), notice())
        assert (result.failure, result.is_final) == (
            f"the mail server refused the address with {answer[:3]}",
            is_final,
        )
        assert send_mail(target(server.port), notice()).failure == ""


def test_server_that_is_off_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = send_mail(target(port), notice())
    assert (result.failure, result.is_final) == (
        "the mail server cannot be reached: Connection refused",
        False,
    )


@pytest.mark.parametrize(
    "name",
    [
        "nas Bcc: x@evil.org",
        "=?utf-8?q?a=0ABcc=3A_x=40evil=2Eorg?=",
        "=?utf-8?q?a=0D=0A=0D=0Abody?=",
        "=?utf-8?b?YQpCY2M6IHhAZXZpbC5vcmc=?=",
        "büro",
    ],
)
def test_name_of_a_machine_cannot_add_a_header(trusted: Any, name: str) -> None:
    changed = notice(event="machine-gone", lost_machine=name, run="train-k3f9")
    with mail_target(trusted, PASSWORD) as server:
        assert send_mail(target(server.port), changed).failure == ""
    (message,) = server.messages
    shown = name.replace("=?", "= ?")
    assert message["Subject"].strip() == f"Barnraise: {shown} is gone from train-k3f9"
    assert message.keys() == mail_message(target(25), notice()).keys()
    assert server.recipients == ["<me@home.org>"]
