"""Traces of steps for OpenTelemetry: one trace for each step, with spans of all machines and phases.

The id of a trace is a hash of the run, the generation and the step. So all workers give their spans the same
trace, and nothing has to be sent between them. Without an OTEL_ variable, nothing of this is loaded.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from barnraise.core.installation import install_hint
from barnraise.history.entries import PHASES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("barnraise.training")

_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_GROUP = "opentelemetry_traces_exporter"
_OTLP = "otlp_proto_http"
_NS = 1_000_000_000


class TracedStep(NamedTuple):
    """A committed step: ``end_s`` is the wall time of its commit, ``phases_s`` the seconds of each phase."""

    generation: int
    step: int
    end_s: float
    seconds: float
    phases_s: Sequence[float]
    samples: int


def wanted_exporter(environ: Mapping[str, str]) -> str:
    """Return the name of the exporter that the OTEL_ variables ask for; empty if they ask for none. Pure."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    named = environ.get(_EXPORTER, "").split(",")[0].strip()
    if named == "none":
        return ""
    if named in ("", "otlp"):
        is_wanted = named or any(environ.get(name) for name in _ENDPOINTS)
        return _OTLP if is_wanted else ""
    return named


def trace_ids(run: str, generation: int, step: int) -> tuple[int, int]:
    """Return the id of a step's trace and of its first span, equal on all machines. Pure."""
    digest = blake3(f"{run}\0{generation}\0{step}".encode()).digest(24)
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")


def open_trace(run: str, machine: str = "") -> StepTrace | None:
    """Return the trace of a run if an OTEL_ variable asks for it; None if not, or if it is not installed."""
    name = wanted_exporter(os.environ)
    if not name:
        return None
    try:
        entries = importlib.metadata.entry_points(group=_GROUP, name=name)
        exporter = next(iter(entries)).load()()
        return StepTrace(run, machine or socket.gethostname(), exporter)
    except (ImportError, StopIteration):
        log.warning("steps are not traced: the exporter %s is not installed: %s", name, install_hint("otel"))
        return None


class StepTrace:
    """Spans of one worker's steps, sent in the background by the SDK of OpenTelemetry."""

    def __init__(self, run: str, machine: str, exporter: SpanExporter, *, at_once: bool = False) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """Random ids, but for the first span of a step."""

            first: tuple[int, int] | None = None

            def generate_span_id(self) -> int:
                first, self.first = self.first, None
                return super().generate_span_id() if first is None else first[1]

            def generate_trace_id(self) -> int:
                return super().generate_trace_id() if self.first is None else self.first[0]

        self._run, self._machine, self._ids = run, machine, Ids()
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes before our own names.
        given = OTELResourceDetector().detect()
        resource = Resource.create({"service.name": "barnraise", "host.name": machine}).merge(given)
        self.provider: TracerProvider = TracerProvider(resource=resource, id_generator=self._ids)
        processor = SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter)
        self.provider.add_span_processor(processor)
        self._tracer = self.provider.get_tracer("barnraise")

    def add(self, step: TracedStep, rank: int) -> None:
        """Add the spans of a step. Rank 0 adds the first span, to which those of all workers belong.

        A phase has one span with its whole time. The spans follow each other, although a step with several
        micro-batches goes through some phases several times.
        """
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace.sampling import Decision

        ids = trace_ids(self._run, step.generation, step.step)
        end = int(step.end_s * _NS)
        start = end - int(step.seconds * _NS)
        facts: dict[str, str | int] = {"barnraise.run": self._run, "barnraise.step": step.step}
        if rank == 0:
            self._ids.first = ids
            self._tracer.start_span("step", context=Context(), attributes=facts, start_time=start).end(end)
            self._ids.first = None
        decision = self.provider.sampler.should_sample(None, ids[0], "step").decision
        is_sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if is_sampled else trace.TraceFlags.DEFAULT)
        first = trace.NonRecordingSpan(trace.SpanContext(*ids, is_remote=True, trace_flags=flags))
        own = self._tracer.start_span(
            self._machine,
            context=trace.set_span_in_context(first, Context()),
            attributes={**facts, "barnraise.rank": rank, "barnraise.samples": step.samples},
            start_time=start,
        )
        at, within = start, trace.set_span_in_context(own, Context())
        for phase, seconds in zip(PHASES, step.phases_s, strict=False):
            until = min(end, at + int(seconds * _NS))
            if until > at:
                self._tracer.start_span(phase, context=within, start_time=at).end(until)
            at = until
        own.end(end)

    def close(self) -> None:
        """Send what is left."""
        self.provider.shutdown()
