"""What is told of requests, without anything that a person wrote: lines of the log, as text or JSON; counts; spans.

Knows no handler. OpenTelemetry is imported where a collector is named; it makes a request's spans at its end, from the
times that the engine has measured anyway, and has a thread of its own that sends.
"""

import json
import logging
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from kvstore import __version__
from kvstore.engine.outputs import MISSES, RequestOutput, sum_usage
from kvstore.errors import ConfigError
from kvstore.stats import Histogram

LOGGER = logging.getLogger("kvstore.service")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
# vLLM's bounds, with a few smaller ones for small models and cached prompts.
TOKEN_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
REQUEST_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680,
)  # fmt: skip
HTTP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
COUNT_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
PHASES = {  # of each answer, as in its timings
    "queue": "Waiting for its turn.",
    "load": "Waiting for blocks from disk before the first step.",
    "prefill": "From the first step to the first token.",
    "decode": "From the first token to the last.",
}
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
Labels = tuple[str, ...]


# -- the log -----------------------------------------------------------------------------------------------------------
class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00Z INFO message name=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        told = "".join(f" {name}={_word(value)}" for name, value in fields.items() if value is not None)
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{_stamp(record)} {record.levelname} {record.getMessage()}{told}{trace}"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {"time": _stamp(record), "level": record.levelname, "message": record.getMessage()}
        found |= {name: value for name, value in getattr(record, "fields", {}).items() if value is not None}
        if record.exc_info:
            found["trace"] = self.formatException(record.exc_info)
        return json.dumps(found)


def set_up_logging(log_format: str, level: str = "info") -> None:
    """Write lines of this level and above to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for logger in map(logging.getLogger, ("kvstore", "aiohttp.server", "opentelemetry")):
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def log(message: str, fields: Mapping[str, object], level: int = logging.INFO, error: Any = None) -> None:
    """Write one line. error: an exception whose trace follows; for bugs only."""
    LOGGER.log(level, message, exc_info=error, extra={"fields": fields})


def _stamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def _word(value: object) -> str:
    """A plain word as it is, anything else as a JSON string, so that a line stays one line."""
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text if text.isascii() and text.isprintable() and " " not in text and '"' not in text else json.dumps(text)


def counts_of(outputs: Sequence[RequestOutput]) -> dict[str, object]:
    """What a request's line says of its answers."""
    if not outputs:
        return {}
    usage = sum_usage([output.usage for output in outputs])
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        **{f"{tier}_tokens": count for tier, count in asdict(usage.cached_tokens_details).items()},
        **({} if usage.miss is None else {"miss": usage.miss.cause, "miss_tokens": usage.miss.tokens}),
        "ttft_s": min((output.ttft_s for output in outputs if output.ttft_s is not None), default=None),
    }


# -- counts ------------------------------------------------------------------------------------------------------------
class Metrics:
    """What one server counts of its requests, in its event loop's thread. Labels are bounded: no path, no user."""

    def __init__(self) -> None:
        self.requests: Counter[Labels] = Counter()
        self.refusals: Counter[Labels] = Counter()
        self.finished: Counter[Labels] = Counter({("stop",): 0, ("length",): 0, ("abort",): 0})
        self.http_s = _histograms(HTTP_BOUNDS_S)
        self.ttft_s, self.e2e_s = _histograms(TTFT_BOUNDS_S), _histograms(REQUEST_BOUNDS_S)
        self.itl_s, self.per_token_s = _histograms(TOKEN_BOUNDS_S), _histograms(TOKEN_BOUNDS_S)
        self.phases = {phase: Histogram(REQUEST_BOUNDS_S) for phase in PHASES}
        self.misses = Counter({(cause,): 0 for cause in MISSES})
        self.prompt_tokens, self.generation_tokens = Histogram(COUNT_BOUNDS), Histogram(COUNT_BOUNDS)

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request that was answered to its end. route: the pattern, or one word where none matched."""
        method = method if method in METHODS else "other"  # a client may invent any number of them
        self.requests[(route, method, str(status))] += 1
        self.http_s[(route, method)].observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that was refused before any work. The reason is one of a few fixed words."""
        self.refusals[(reason,)] += 1

    def answer_ended(self, output: RequestOutput, route: str, itl_s: Sequence[float] | None = None) -> None:
        """Count an answer that has ended. itl_s: seconds between its pieces, if they were read as they came."""
        usage, timings, labels = output.usage, output.timings, (route,)
        for choice in output.choices:
            self.finished[(choice.finish_reason or "abort",)] += 1
        if usage.miss is not None:
            self.misses[(usage.miss.cause,)] += usage.miss.tokens
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.generation_tokens.observe(usage.completion_tokens)
        for phase, found in self.phases.items():
            if (seconds := getattr(timings, f"{phase}_s")) is not None:
                found.observe(seconds)
        if output.ttft_s is not None:
            self.ttft_s[labels].observe(output.ttft_s)
            self.e2e_s[labels].observe(output.ttft_s + (timings.decode_s or 0.0))
        num_after_first = max((len(choice.token_ids) for choice in output.choices), default=0) - 1
        if timings.decode_s is not None and num_after_first > 0:
            self.per_token_s[labels].observe(timings.decode_s / num_after_first)
        for seconds in itl_s or ():
            self.itl_s[labels].observe(seconds)


def _histograms(bounds: tuple[float, ...]) -> defaultdict[Labels, Histogram]:
    return defaultdict(partial(Histogram, bounds))


# -- spans -------------------------------------------------------------------------------------------------------------
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
        self, fields: Mapping[str, object], headers: Mapping[str, str], answers: Sequence[RequestOutput],
        started_s: float,
    ) -> None:  # fmt: skip
        """A request that ends now. fields: of its line in the log. headers: of the request; a traceparent names the
        parent. started_s: on the clock of time.monotonic, as the answers' arrivals.
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
        for answer in answers:
            edge_s = end_s if answer.arrival_s is None else answer.arrival_s
            for phase in PHASES:
                if (phase_s := getattr(answer.timings, f"{phase}_s")) is not None:
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
