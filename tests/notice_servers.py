"""Servers on loopback that take notices: HTTP with or without TLS, and SMTP with STARTTLS and a login."""

from __future__ import annotations

import base64
import datetime
import email
import email.policy
import socketserver
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


class Received(NamedTuple):
    """Request that a server has received."""

    path: str
    headers: dict[str, str]
    body: bytes


class HttpTarget:
    """HTTP server that answers with the next of some status codes, then with 200.

    ``redirect``: the place that a redirect names.
    """

    def __init__(
        self, statuses: Iterable[int] = (), *, tls: ssl.SSLContext | None = None, redirect: str = ""
    ) -> None:
        self.received: list[Received] = []
        self.gate = threading.Event()  # an answer waits for it
        self.gate.set()
        remaining = iter(statuses)
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                target.received.append(Received(self.path, dict(self.headers), body))
                target.gate.wait(60)
                self.send_response(next(remaining, 200))
                if redirect:
                    self.send_header("Location", redirect)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop the server and close its port."""
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def http_target(
    statuses: Iterable[int] = (), *, tls: ssl.SSLContext | None = None, redirect: str = ""
) -> Iterator[HttpTarget]:
    """Run an HTTP server until the context exits."""
    server = HttpTarget(statuses, tls=tls, redirect=redirect)
    try:
        yield server
    finally:
        server.close()


class MailTarget:
    """SMTP server that takes mail over TLS only, from one user with a password.

    ``refusals``: answers to RCPT that come before it accepts. ``has_tls``: it offers STARTTLS.
    """

    def __init__(
        self, context: ssl.SSLContext, password: str, *, refusals: Iterable[str] = (), has_tls: bool = True
    ) -> None:
        self.messages: list[EmailMessage] = []
        self.recipients: list[str] = []
        self.clear: list[str] = []  # commands that came without TLS
        self.context, self.password, self.has_tls = context, password, has_tls
        self.refusals = iter(refusals)
        target = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    _Dialog(target, self).run()
                except OSError:  # a client that does not trust the certificate is gone
                    pass

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop the server and close its port."""
        self._server.shutdown()
        self._server.server_close()


class _Dialog:
    """One connection of a mail client."""

    def __init__(self, target: MailTarget, handler: socketserver.StreamRequestHandler) -> None:
        self.target = target
        self.reader, self.writer = handler.rfile, handler.wfile
        self.connection = handler.request
        self.is_tls = self.is_known = False

    def run(self) -> None:
        """Answer the commands of the client until it quits, and close the connection."""
        try:
            self.answer()
        finally:
            self.connection.close()

    def answer(self) -> None:
        """Answer the commands of the client until it quits."""
        self.say("220 test")
        while line := self.reader.readline():
            text = line.decode().strip()
            word = text.split(" ")[0].upper()
            if not self.is_tls:
                self.target.clear.append(text)
            if word == "EHLO":
                offer = "AUTH PLAIN" if self.is_tls else "STARTTLS" if self.target.has_tls else "8BITMIME"
                self.say(f"250-test\r\n250 {offer}")
            elif word == "STARTTLS":
                self.say("220 go on")
                secured = self.target.context.wrap_socket(self.connection, server_side=True)
                self.reader, self.writer = secured.makefile("rb"), secured.makefile("wb", buffering=0)
                self.connection = secured
                self.is_tls = True
            elif word == "AUTH":
                given = base64.b64decode(text.split(" ")[2]).split(b"\0")
                self.is_known = given[1:] == [b"me", self.target.password.encode()]
                self.say("235 welcome" if self.is_known else "535 wrong password")
            elif not self.is_known and word in ("MAIL", "RCPT", "DATA"):
                self.say("530 log in first")
            elif word == "RCPT":
                refusal = next(self.target.refusals, "")
                if not refusal:
                    self.target.recipients.append(text.partition(":")[2])
                self.say(refusal or "250 yes")
            elif word == "DATA":
                self.say("354 go on")
                self.target.messages.append(self.message())
                self.say("250 taken")
            elif word == "QUIT":
                self.say("221 bye")
                return
            else:
                self.say("250 yes")

    def message(self) -> EmailMessage:
        """Read a mail up to the line with a single dot."""
        lines = []
        while (line := self.reader.readline()) not in (b".\r\n", b""):
            lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
        return email.message_from_bytes(b"".join(lines), policy=email.policy.default)

    def say(self, text: str) -> None:
        """Send a line to the client."""
        self.writer.write(f"{text}\r\n".encode())


@contextmanager
def mail_target(
    context: ssl.SSLContext, password: str, *, refusals: Iterable[str] = (), has_tls: bool = True
) -> Iterator[MailTarget]:
    """Run a mail server until the context exits."""
    server = MailTarget(context, password, refusals=refusals, has_tls=has_tls)
    try:
        yield server
    finally:
        server.close()


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Make a certificate for 127.0.0.1; return its file for clients, and the context of a server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, SHA256())
    )
    path = folder / "certificate.pem"
    path.write_bytes(made.public_bytes(Encoding.PEM))
    both = folder / "server.pem"
    both.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + path.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return path, context
