"""Traces: all machines put a step into the same trace without telling each other, and phases into spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from barnraise.training.record.step_trace import (
    StepTrace,
    TracedStep,
    open_trace,
    trace_ids,
    wanted_exporter,
)

PHASES_S = (0.1, 0.5, 0.2, 0.0, 0.0, 0.2)


def traced(step: int) -> TracedStep:
    return TracedStep(3, step, 1_700_000_000.0 + step, 1.0, PHASES_S, 64)


def spans_of(machine: str, rank: int, steps: range) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    trace = StepTrace("spiral-1", machine, exporter, at_once=True)
    for step in steps:
        trace.add(traced(step), rank)
    trace.close()
    return list(exporter.get_finished_spans())


def test_all_machines_put_a_step_into_one_trace() -> None:
    spans = [*spans_of("mac", 0, range(2)), *spans_of("pc", 1, range(2))]
    by_trace: dict[int, list[ReadableSpan]] = {}
    for span in spans:
        assert span.context is not None
        by_trace.setdefault(span.context.trace_id, []).append(span)
    assert set(by_trace) == {trace_ids("spiral-1", 3, step)[0] for step in range(2)}
    for members in by_trace.values():
        (first,) = [span for span in members if span.parent is None]
        assert first.name == "step"
        workers = {
            span.name: span for span in members if span.parent == first.context or _is_below(span, first)
        }
        assert set(workers) == {"mac", "pc"}
        for machine in ("mac", "pc"):
            own = [span for span in members if _is_below(span, workers[machine])]
            assert [span.name for span in own] == ["data", "compute", "communication", "other"]


def _is_below(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert parent.context is not None
    return span.parent is not None and span.parent.span_id == parent.context.span_id


def test_spans_of_phases_fill_the_step() -> None:
    spans = {span.name: span for span in spans_of("mac", 0, range(1))}
    step = spans["step"]
    assert step.start_time is not None
    assert step.end_time is not None
    assert step.end_time - step.start_time == 1_000_000_000
    assert spans["data"].start_time == step.start_time
    assert spans["compute"].start_time == spans["data"].end_time
    assert abs((spans["other"].end_time or 0) - step.end_time) < 1000
    assert dict(step.attributes or {}) == {"barnraise.run": "spiral-1", "barnraise.step": 0}


def test_sampler_decides_alike_on_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.3")
    first = {span.context.trace_id for span in spans_of("mac", 0, range(200)) if span.context}
    other = {span.context.trace_id for span in spans_of("pc", 1, range(200)) if span.context}
    assert first == other
    assert 20 < len(first) < 120


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"OTEL_SERVICE_NAME": "x"}, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp_proto_http"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"}, ""),
    ],
)
def test_variables_of_opentelemetry_say_where_traces_go(environ: dict[str, str], expected: str) -> None:
    assert wanted_exporter(environ) == expected


def test_nothing_is_traced_without_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert open_trace("spiral-1") is None


def test_exporter_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin_of_nobody")
    assert open_trace("spiral-1") is None
    assert "zipkin_of_nobody is not installed" in caplog.text


class Receiver(BaseHTTPRequestHandler):
    """OTLP receiver that keeps what it gets."""

    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append(request)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[HTTPServer]:
    Receiver.received = []
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_an_otlp_receiver(receiver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=home")
    trace = open_trace("spiral-1", "mac")
    assert trace is not None
    trace.add(traced(7), 0)
    trace.close()
    (request,) = Receiver.received
    (resource,) = request.resource_spans
    facts = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert facts["deployment.environment"] == "home"
    assert (facts["service.name"], facts["host.name"]) == ("barnraise", "mac")
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"step", "mac", "data", "compute", "communication", "other"}
    assert {int.from_bytes(span.trace_id, "big") for span in spans} == {trace_ids("spiral-1", 3, 7)[0]}
