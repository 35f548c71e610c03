"""OpenTelemetry spans of requests, made at their end from the times that the engine has measured anyway.

Knows no handler. OpenTelemetry is imported where a collector is named; it has a thread of its own that sends.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence

from kvstore import __version__
from kvstore.engine.outputs import Timings
from kvstore.errors import ConfigError
from kvstore.service.api.metrics import PHASES

SEND_S = 10.0  # for one batch of spans
OF_SPANS = ("seconds", "traceparent")  # what a span says by itself
NAMES = {  # of OpenTelemetry's conventions, by the names in the log; what has none is below "kvstore."
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "code": "error.type",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}


class Traces:
    """Sends spans to a collector that takes OTLP over HTTP. Raises ConfigError without the extra `otel`.

    OpenTelemetry's own variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...) count.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            remedy = "install the extra: pip install 'kvstore-llm[otel]'"
            raise ConfigError("otlp_traces_endpoint", f"{endpoint}, without OpenTelemetry", remedy) from None
        name = os.environ.get("OTEL_SERVICE_NAME", "kvstore")
        about = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=about, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=SEND_S)))
        self._tracer = self._provider.get_tracer("kvstore", __version__)

    def request_ended(
        self, fields: Mapping[str, object], headers: Mapping[str, str], answers: Sequence[Timings], started_s: float
    ) -> None:
        """A request that ends now. fields: of its line in the log. headers: of the request; a traceparent names the
        parent. answers: where the time of each went. started_s: on the clock of time.monotonic, as theirs.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end_ns, end_s = time.time_ns(), time.monotonic()

        def at(clock_s: float) -> int:
            return end_ns - int((end_s - clock_s) * 1e9)

        told = {
            NAMES.get(name, f"kvstore.{name}"): value
            for name, value in fields.items() if value is not None and name not in OF_SPANS
        }  # fmt: skip
        span = self._tracer.start_span(
            f"{fields['method']} {fields['route']}", TraceContextTextMapPropagator().extract(headers), SpanKind.SERVER,
            told, start_time=at(started_s),
        )  # fmt: skip
        within = set_span_in_context(span)
        for timings in answers:
            edge_s = end_s if timings.arrival_s is None else timings.arrival_s
            for phase in PHASES:
                if (phase_s := getattr(timings, f"{phase}_s")) is not None:
                    part = self._tracer.start_span(phase, within, start_time=at(edge_s))
                    edge_s += phase_s
                    part.end(at(edge_s))
        if str(fields["status"]) >= "500":
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> threading.Thread:
        """Send what is left, in a thread that ends by itself; nobody has to wait for it."""
        sending = threading.Thread(target=self._provider.shutdown, name="kvstore-traces", daemon=True)
        sending.start()
        return sending
