"""Rules for requests of browsers: which host, origin and method they may have. Pure.

A page of the internet can send requests to loopback, also under its own name (DNS rebinding). Browsers say
where a request comes from. A cookie alone is not enough: browsers send it to every port of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers

from barnraise.core.host_header import host_name, is_loopback

MOST_BODY = 8 << 10
MOST_PATH = 4 << 10
MOST_HEADERS = 16 << 10
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: browsers would then send forms of this page with the origin null.
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class RequestRefusal:
    """Status and sentence of a rejected request."""

    status: int
    sentence: str


def refuse_request(method: str, target_bytes: int, headers: Headers, *, opens: bool) -> RequestRefusal | None:
    """Return why a request is rejected before its cookie is read; None if it is not.

    ``opens``: the request uses a one-time link. A person may follow it from another program or page.
    """
    hosts = headers.getlist("host")
    host = host_name(hosts[0]) if len(hosts) == 1 else ""
    if not host or not is_loopback(host):
        return RequestRefusal(421, "This page is known as 127.0.0.1 only.")
    if method not in ("GET", "HEAD", "POST"):
        return RequestRefusal(405, "This method is not supported.")
    if target_bytes > MOST_PATH:
        return RequestRefusal(414, "The address is too long.")
    if sum(len(name) + len(value) for name, value in headers.raw) > MOST_HEADERS:
        return RequestRefusal(431, "The headers are too large.")
    if method != "POST":
        return _refuse_read(headers, f"http://{hosts[0]}", opens=opens)
    return _refuse_change(headers, f"http://{hosts[0]}", opens=opens)


def _refuse_read(headers: Headers, own: str, *, opens: bool) -> RequestRefusal | None:
    site: str = headers.get("sec-fetch-site", "none")
    is_visit = headers.get("sec-fetch-mode", "navigate") == "navigate"
    if site not in ("same-origin", "none") and not (opens and is_visit):
        return _elsewhere()
    if headers.get("origin", own) != own:
        return _elsewhere()
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        return RequestRefusal(413, "A request to read has no body.")
    return None


def _refuse_change(headers: Headers, own: str, *, opens: bool) -> RequestRefusal | None:
    if opens or headers.get("origin") != own or headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return _elsewhere()
    if headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        return RequestRefusal(415, "A change is sent by a form.")
    length = headers.get("content-length", "")
    if not length.isdecimal() or len(length) > 9 or "transfer-encoding" in headers:
        return RequestRefusal(411, "The length of the form is missing.")
    return RequestRefusal(413, "The form is too large.") if int(length) > MOST_BODY else None


def _elsewhere() -> RequestRefusal:
    return RequestRefusal(403, "The request comes from another page.")
