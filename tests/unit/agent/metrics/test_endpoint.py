"""Endpoint: programs of this machine read the metrics, and web pages and other machines do not."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from barnraise.agent.metrics import endpoint as endpoint_module
from barnraise.agent.metrics.endpoint import MetricsEndpoint, Page

TEXT = b"# HELP barnraise_runs Runs.\n# TYPE barnraise_runs gauge\nbarnraise_runs 1.0\n"
PAGE = Page("200 OK", "text/plain", TEXT)


def ask(port: int, path: str = "/metrics", host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    if host is not None:
        request.add_header("Host", host)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def serve(use: Callable[[MetricsEndpoint], object]) -> object:
    async def collect() -> Page:
        await asyncio.sleep(0)
        return PAGE

    async def fail() -> Page:
        return Page("503 Service Unavailable", "application/json", b"{}")

    async def main() -> object:
        endpoint = MetricsEndpoint(0, {"/metrics": collect, "/health": fail})
        try:
            return await asyncio.to_thread(use, endpoint)
        finally:
            await endpoint.close()

    return asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:52417", "localhost", "LOCALHOST.:1", "[::1]:9"])
def test_program_of_this_machine_reads_the_metrics(host: str) -> None:
    assert serve(lambda endpoint: ask(endpoint.port, host=host)) == (200, TEXT)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "127.0.0.1@evil"])
def test_page_that_leads_its_name_here_reads_nothing(host: str) -> None:
    status, body = serve(lambda endpoint: ask(endpoint.port, host=host))  # type: ignore[misc]
    assert status == 421
    assert b"barnraise_runs" not in body


def test_agent_that_is_too_busy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_REQUEST_S", 0.1)

    async def collect() -> Page:
        await asyncio.sleep(1)
        return PAGE

    async def main() -> tuple[int, bytes]:
        endpoint = MetricsEndpoint(0, {"/metrics": collect})
        try:
            return await asyncio.to_thread(ask, endpoint.port)
        finally:
            await endpoint.close()

    assert asyncio.run(main())[0] == 503


def test_page_answers_with_its_own_status() -> None:
    assert serve(lambda endpoint: ask(endpoint.port, "/health")) == (503, b"{}")


def test_other_paths_and_methods_are_refused() -> None:
    assert serve(lambda endpoint: ask(endpoint.port, "/")[0]) == 404
    assert serve(lambda endpoint: ask(endpoint.port, method="POST")[0]) == 405
    assert serve(lambda endpoint: ask(endpoint.port, method="HEAD")) == (200, b"")


def test_port_is_open_on_loopback_only() -> None:
    def bound(endpoint: MetricsEndpoint) -> str:
        return str(endpoint._server.socket.getsockname()[0])

    assert serve(bound) == "127.0.0.1"


def test_silent_connections_do_not_keep_a_scrape_away() -> None:
    def use(endpoint: MetricsEndpoint) -> object:
        silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(4)]
        try:
            return ask(endpoint.port)
        finally:
            for connection in silent:
                connection.close()

    assert serve(use) == (200, TEXT)


def test_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        async def collect() -> Page:
            return PAGE

        async def main() -> None:
            MetricsEndpoint(other.getsockname()[1], {"/metrics": collect})

        with pytest.raises(OSError, match="in use"):
            asyncio.run(main())
