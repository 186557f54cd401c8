"""Rules for requests: only this machine's name as host, only this page as origin."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from barnraise.page.access.guard import MOST_BODY, MOST_HEADERS, MOST_PATH, refuse_request

HOST = "127.0.0.1:9000"
FORM = {
    "host": HOST,
    "origin": f"http://{HOST}",
    "content-type": "application/x-www-form-urlencoded",
    "content-length": "20",
}


def _status(method: str, headers: dict[str, str], *, opens: bool = False, size: int = 20) -> int:
    refusal = refuse_request(method, size, Headers(headers), opens=opens)
    return refusal.status if refusal is not None else 200


@pytest.mark.parametrize("host", [HOST, "localhost:8000", "[::1]:1", "127.0.0.1"])
def test_names_of_this_machine_are_hosts(host: str) -> None:
    assert _status("GET", {"host": host}) == 200


@pytest.mark.parametrize("host", ["evil.example:9000", "127.0.0.1.evil.example", "192.168.0.3", "", "a@b:c"])
def test_other_hosts_are_refused_as_after_dns_rebinding(host: str) -> None:
    assert _status("GET", {"host": host}) == 421


def test_missing_and_repeated_hosts_are_refused() -> None:
    assert _status("GET", {}) == 421
    twice = Headers(raw=[(b"host", HOST.encode()), (b"host", b"evil.example")])
    assert refuse_request("GET", 20, twice, opens=False) is not None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_pages_read_nothing(site: str) -> None:
    for mode in ("cors", "no-cors", "navigate"):
        assert _status("GET", {"host": HOST, "sec-fetch-site": site, "sec-fetch-mode": mode}) == 403
    assert _status("GET", {"host": HOST, "origin": "http://evil.example"}) == 403
    assert _status("GET", {"host": HOST, "origin": "null"}) == 403


def test_link_may_be_followed_from_elsewhere_but_not_fetched() -> None:
    visit = {"host": HOST, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert _status("GET", visit, opens=True) == 200
    assert _status("GET", {**visit, "sec-fetch-mode": "no-cors"}, opens=True) == 403
    assert _status("POST", FORM, opens=True) == 403


def test_form_of_this_page_is_accepted() -> None:
    assert _status("POST", FORM) == 200
    assert _status("POST", {**FORM, "sec-fetch-site": "same-origin"}) == 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9001"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-length": ""}, 411),
        ({"content-length": "9" * 12}, 411),
        ({"transfer-encoding": "chunked"}, 411),
        ({"content-length": str(MOST_BODY + 1)}, 413),
    ],
)
def test_other_changes_are_refused(change: dict[str, str], status: int) -> None:
    assert _status("POST", {**FORM, **change}) == status


def test_change_without_origin_is_refused() -> None:
    assert _status("POST", {name: value for name, value in FORM.items() if name != "origin"}) == 403


def test_sizes_and_methods_are_bounded() -> None:
    assert _status("GET", {"host": HOST}, size=MOST_PATH + 1) == 414
    assert _status("GET", {"host": HOST, "x-long": "a" * MOST_HEADERS}) == 431
    assert _status("GET", {"host": HOST, "content-length": "1"}) == 413
    assert _status("DELETE", {"host": HOST}) == 405
    assert _status("OPTIONS", {"host": HOST}) == 405
