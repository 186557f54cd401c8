"""Targets of notifications: the desktop, a webhook, an ntfy topic, an e-mail address. Pure.

A target holds secrets: the address of a webhook is one, the name of a topic too. ``masked`` is what people
see of a target; its ``repr`` shows nothing.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from barnraise.core.errors import ConfigError
from barnraise.core.host_header import is_loopback

EventName = Literal["done", "failed", "stalled", "no-news", "machine-gone"]
EVENTS: tuple[EventName, ...] = get_args(EventName)
SUBMISSION_PORT = 587
TLS_PORT = 465  # TLS from the first byte

Url = Annotated[str, Meta(min_length=8, max_length=2000)]
Secret = Annotated[str, Meta(max_length=1000)]
Address = Annotated[str, Meta(min_length=3, max_length=320)]
Host = Annotated[str, Meta(min_length=1, max_length=253)]

_ADDRESS = re.compile(r"[!#-'*+./-9=?A-Z^-~-]+@[A-Za-z0-9.-]+")
_HOST = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")
_TOPIC = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VISIBLE = re.compile(r"[!-~]+")
_SHOWN_LABELS = 2  # of the name of a host
_HINT = "Write desktop, webhook=URL, ntfy=URL/TOPIC or email=ADDRESS."


class DesktopTarget(msgspec.Struct, frozen=True, tag="desktop"):
    """Desktop of this machine's user."""

    @property
    def masked(self) -> str:
        return "this machine's desktop"


class WebhookTarget(msgspec.Struct, frozen=True, tag="webhook"):
    """URL that gets JSON. ``token``: for the header Authorization; may be empty."""

    url: Url
    token: Secret = ""

    def __repr__(self) -> str:
        return "WebhookTarget(...)"

    @property
    def masked(self) -> str:
        return _masked_url(self.url)


class NtfyTarget(msgspec.Struct, frozen=True, tag="ntfy"):
    """Topic of an ntfy server. ``token``: an access token of that server; may be empty."""

    url: Url
    token: Secret = ""

    def __repr__(self) -> str:
        return "NtfyTarget(...)"

    @property
    def masked(self) -> str:
        return _masked_url(self.url)


class EmailTarget(msgspec.Struct, frozen=True, kw_only=True, tag="email"):
    """E-mail address, and the server that takes the mail. ``user`` is empty if no login is needed."""

    address: Address
    host: Host
    port: Annotated[int, Meta(ge=1, le=65535)] = SUBMISSION_PORT
    user: Secret = ""
    password: Secret = ""
    sender: Address

    def __repr__(self) -> str:
        return "EmailTarget(...)"

    @property
    def masked(self) -> str:
        name, _, domain = self.address.rpartition("@")
        return f"{name[:1]}…@{domain} by {self.host}:{self.port}"


Target = DesktopTarget | WebhookTarget | NtfyTarget | EmailTarget


def kind_of(target: Target) -> str:
    """Return the word for a kind of target, which also begins its name."""
    return str(target.__struct_config__.tag)


def check_target(target: Target) -> None:
    """Raise ConfigError if a target cannot be used. The error quotes no secret."""
    try:
        msgspec.convert(msgspec.to_builtins(target), Target)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "a part of the target is empty or too long", hint="A URL has at most 2,000 characters."
        ) from error
    match target:
        case WebhookTarget():
            _check_url(target.url, "webhook")
            _check_token(target.token)
        case NtfyTarget():
            path = _check_url(target.url, "ntfy").strip("/")
            if not _TOPIC.fullmatch(path.rpartition("/")[2]):
                raise ConfigError("ntfy needs a topic", hint="Write for example ntfy=https://ntfy.sh/TOPIC.")
            _check_token(target.token)
        case EmailTarget():
            for address in (target.address, target.sender):
                if not _ADDRESS.fullmatch(address):
                    raise ConfigError(
                        "this is no e-mail address", hint="Write for example email=me@home.org."
                    )
            if not _HOST.fullmatch(target.host):
                raise ConfigError(
                    "this is no mail server", hint="Write for example --smtp smtp.home.org:587."
                )
            if bool(target.user) != bool(target.password):
                raise ConfigError("a login needs a user and a password", hint="Give --user, and type both.")


def is_unencrypted(target: Target) -> bool:
    """Tell whether notices for this target travel in the clear to another machine."""
    if not isinstance(target, WebhookTarget | NtfyTarget):
        return False
    parts = urlsplit(target.url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def parse_events(text: str) -> tuple[EventName, ...]:
    """Return the events of a list such as ``done,failed``, in the usual order; raise ConfigError."""
    words = {word.strip() for word in text.split(",") if word.strip()}
    chosen = tuple(event for event in EVENTS if event in words)
    if unknown := words.difference(EVENTS):
        raise ConfigError(f"{min(unknown)!r} is no event", hint=f"Choose among {', '.join(EVENTS)}.")
    if not chosen:
        raise ConfigError("no event is chosen", hint=f"Choose among {', '.join(EVENTS)}.")
    return chosen


def split_target(text: str) -> tuple[str, str]:
    """Return the kind and the address of a target as it is typed; raise ConfigError for another kind."""
    kind, equals, address = text.strip().partition("=")
    if kind == "desktop" and not equals:
        return kind, ""
    if kind not in ("webhook", "ntfy", "email") or not address:
        raise ConfigError("this is no target of notifications", hint=_HINT)
    return kind, address


def split_server(text: str) -> tuple[str, int]:
    """Return host and port of a mail server as it is typed; raise ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text, SUBMISSION_PORT
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{port!r} is no port", hint="Write for example --smtp smtp.home.org:587.")
    return host, int(port)


def _check_url(url: str, kind: str) -> str:
    """Return the path of a URL; raise ConfigError if it is none for HTTP."""
    hint = f"Write for example {kind}=https://HOST/PATH."
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError("this is no URL", hint=hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError("this URL is not one of http or https", hint=hint)
    if "@" in parts.netloc:
        raise ConfigError("the URL holds a login", hint="Use an access token: --token.")
    if not _VISIBLE.fullmatch(url) or parts.fragment:
        raise ConfigError("the URL has a character that no request can carry", hint=hint)
    return parts.path


def _check_token(token: str) -> None:
    if token and not _VISIBLE.fullmatch(token):
        raise ConfigError("the token has a character that no request can carry", hint="Copy it again.")


def _masked_url(url: str) -> str:
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://{_masked_host(parts.hostname or '')}{port}/…"


def _masked_host(host: str) -> str:
    """Return an address as it is, and the last two parts of a name: a part before them may be a secret."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        labels = host.rstrip(".").split(".")
        return ".".join(("…", *labels[-_SHOWN_LABELS:]) if len(labels) > _SHOWN_LABELS else labels)
    return f"[{address}]" if address.version == 6 else str(address)
