"""Notices over HTTP: JSON for a webhook, and text for an ntfy topic."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request

from barnraise import __version__
from barnraise.agent.notifications.delivery import TIMEOUT_S, Delivery, certificate_delivery, http_delivery
from barnraise.agent.notifications.notice import Notice
from barnraise.agent_client.notifications.targets import NtfyTarget, WebhookTarget

_URGENT = ("failed", "stalled", "no-news", "machine-gone")


def web_request(target: WebhookTarget | NtfyTarget, notice: Notice) -> urllib.request.Request:
    """Return the request that brings a notice to a target. Pure."""
    headers = {"User-Agent": f"barnraise/{__version__}"}
    if target.token:
        headers["Authorization"] = f"Bearer {target.token}"
    if isinstance(target, WebhookTarget):
        headers["Content-Type"] = "application/json"
        body = json.dumps(notice.to_json()).encode()
    else:
        # A header holds ASCII only; the text has the names as they are.
        headers["Title"] = notice.header_title.encode("ascii", "replace").decode()
        headers["Priority"] = "high" if notice.event in _URGENT else "default"
        headers["Content-Type"] = "text/plain; charset=utf-8"
        body = notice.text.encode()
    return urllib.request.Request(target.url, body, headers, method="POST")  # noqa: S310  # check_target


def post(target: WebhookTarget | NtfyTarget, notice: Notice) -> Delivery:
    """Send a notice over HTTP. Certificates are checked, and a redirect is a failure."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
    ):
        opener.add_handler(handler)
    try:
        # Without a handler for them, redirects and errors come back as responses.
        with opener.open(web_request(target, notice), timeout=TIMEOUT_S) as response:
            return http_delivery(response.status)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return web_failure(error)


def web_failure(error: Exception) -> Delivery:
    """Return why a request failed. The text of an error may quote the URL, so it is not used. Pure."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return certificate_delivery("server", reason.verify_code, reason.verify_message)
    if isinstance(reason, TimeoutError):
        return Delivery(f"the server did not answer within {TIMEOUT_S:g} s")
    if isinstance(reason, OSError) and reason.strerror:
        return Delivery(f"the server cannot be reached: {reason.strerror}")
    # A ValueError comes from our side, such as a host whose name cannot be encoded.
    return Delivery(f"the request failed: {type(reason).__name__}", isinstance(reason, ValueError))
