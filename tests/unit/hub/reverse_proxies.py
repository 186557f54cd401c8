"""Real reverse proxies on loopback, configured as the documentation says."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import shutil
import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.repository import ROOT

DOCS = ROOT / "docs"
DOMAIN, HUB, HIDDEN = "hub.example.org", "127.0.0.1:52480", "/kQ3v9mXwTz7b"
_CERTIFICATES = f"/etc/letsencrypt/live/{DOMAIN}"
_STARTS_S = 90.0


def program(name: str) -> str | None:
    """Find a program, also where only root's PATH has it, as on Debian."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def example(page: str, has: str) -> str:
    """Return the one code block of this page that contains these words."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```\w*\n(.*?)^\1```$", text, re.M | re.S)
    (block,) = [textwrap.dedent(block) for _, block in blocks if has in block]
    return block


def filled_in(text: str, values: Mapping[str, str]) -> str:
    """Replace the example's values by this machine's; each value must occur."""
    for written, value in values.items():
        assert written in text, f"{written} is not in the example any more"
        text = text.replace(written, value)
    return text


class Nginx:
    """The server of docs/friends.md, and the same with the hidden path of docs/hub.md."""

    def __init__(self, room: Path, hub: int, open_port: int, hidden_port: int) -> None:
        self.room = room
        self.root = room / "root.pem"
        made = make_certificates()
        for name, data in zip((self.root.name, "fullchain.pem", "privkey.pem"), made, strict=True):
            (room / name).write_bytes(data)
        nginx_example = example("friends.md", "proxy_pass")
        (plain,) = re.findall(r"^    location / \{.*?^    \}\n", nginx_example, re.M | re.S)
        hidden = nginx_example.replace(plain, example("hub.md", "proxy_pass"))
        servers = [self._server(nginx_example, hub, open_port), self._server(hidden, hub, hidden_port)]
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = "\n".join(f"{kind}_temp_path {room}/{kind};" for kind in kinds)
        user = "user root;\n" if os.geteuid() == 0 else ""  # or it may not enter the test's own folder
        http = f"access_log off;\n{folders}\n" + "\n".join(servers)
        (room / "nginx.conf").write_text(f"{user}pid {room}/pid;\nevents {{}}\nhttp {{\n{http}\n}}\n")

    def _server(self, text: str, hub: int, port: int) -> str:
        values = {_CERTIFICATES: str(self.room), "443 ssl": f"127.0.0.1:{port} ssl", DOMAIN: "localhost"}
        return filled_in(text, values | {HUB: f"127.0.0.1:{hub}"})

    def command(self) -> list[str]:
        config = str(self.room / "nginx.conf")
        return [program("nginx") or "nginx", "-c", config, "-g", "daemon off; error_log stderr;"]


class Caddy:
    """The sites of docs/friends.md and docs/hub.md. Caddy is its own authority for `localhost`."""

    def __init__(self, room: Path, hub: int, open_port: int, hidden_port: int) -> None:
        self.room = room
        self.root = room / "pki" / "authorities" / "local" / "root.crt"
        options = (
            "admin off",
            "skip_install_trust",
            "auto_https disable_redirects",
            "default_bind 127.0.0.1",
            f"storage file_system {room}",
        )
        pages = {"friends.md": open_port, "hub.md": hidden_port}
        sites = [
            filled_in(example(page, "reverse_proxy"), {DOMAIN: f"localhost:{port}", HUB: f"127.0.0.1:{hub}"})
            for page, port in pages.items()
        ]
        (room / "Caddyfile").write_text("\n".join(("{", *options, "}", *sites)))

    def command(self) -> list[str]:
        config = str(self.room / "Caddyfile")
        return [program("caddy") or "caddy", "run", "--config", config, "--adapter", "caddyfile"]


@contextlib.contextmanager
def running(proxy: Nginx | Caddy, *ports: int) -> Iterator[None]:
    """Run a proxy while the context is open; it listens at these ports and its root certificate exists."""
    log_path = proxy.room / "said"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            proxy.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=proxy.room
        )
    try:
        give_up = time.monotonic() + _STARTS_S
        while not (proxy.root.exists() and all(map(_listens, ports))):
            assert process.poll() is None, log_path.read_text(errors="replace")
            assert time.monotonic() < give_up, f"it does not listen:\n{log_path.read_text(errors='replace')}"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(60)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def make_certificates(address: str = "") -> tuple[bytes, bytes, bytes]:
    """Make a root, a certificate for `localhost` or an address and its key, as an ordinary authority does."""
    subject_name = x509.IPAddress(ipaddress.ip_address(address)) if address else x509.DNSName("localhost")
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    usages = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    usages += " key_cert_sign crl_sign encipher_only decipher_only"
    usage = dict.fromkeys(usages.split(), False)

    def certificate(subject: x509.Name, holder: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(root)
        made = made.public_key(holder.public_key()).serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=1))
        made = made.not_valid_after(now + datetime.timedelta(days=2))
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        made = made.add_extension(issuer, critical=False)
        return made.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(holder.public_key()), critical=False
        )

    own = certificate(root, authority).add_extension(x509.BasicConstraints(True, 0), critical=True)
    own = own.add_extension(x509.KeyUsage(**(usage | {"key_cert_sign": True})), critical=True)
    leaf = certificate(name, key).add_extension(x509.BasicConstraints(False, None), critical=True)
    leaf = leaf.add_extension(x509.SubjectAlternativeName([subject_name]), critical=False)
    return (
        own.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM),
        leaf.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
