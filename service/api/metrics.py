"""The service's own counters and the engine's, in Prometheus' text format.

Belongs to the event loop's thread. Labels are bounded: a route's pattern, never a path; no tenant, no user.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest

from kvstore.engine.outputs import RequestOutput
from kvstore.service.api.engine_metrics import Stats, as_vllm_shows, counter, engine_families, histogram
from kvstore.stats import Histogram

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

Labels = tuple[str, ...]


class Metrics:
    """The metrics of one server. `render` may be called at any time; it is given the engine's counters."""

    def __init__(self) -> None:
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)  # memory, descriptors, CPU time, under their standard names
        self._requests: Counter[Labels] = Counter()
        self._refused: Counter[Labels] = Counter()
        self._finished: Counter[Labels] = Counter({("stop",): 0, ("length",): 0, ("abort",): 0})
        self._http_s = _histograms(HTTP_BOUNDS_S)
        self._ttft_s, self._e2e_s = _histograms(TTFT_BOUNDS_S), _histograms(REQUEST_BOUNDS_S)
        self._itl_s, self._per_token_s = _histograms(TOKEN_BOUNDS_S), _histograms(TOKEN_BOUNDS_S)
        self._phases = {phase: Histogram(REQUEST_BOUNDS_S) for phase in PHASES}
        self._prompt_tokens, self._generation_tokens = Histogram(COUNT_BOUNDS), Histogram(COUNT_BOUNDS)

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request that was answered to its end. route: the pattern, or one word where none matched."""
        method = method if method in METHODS else "other"  # a client may invent any number of them
        self._requests[(route, method, str(status))] += 1
        self._http_s[(route, method)].observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that was refused before any work. The reason is one of a few fixed words."""
        self._refused[(reason,)] += 1

    def answer_ended(self, output: RequestOutput, route: str, itl_s: Sequence[float] | None = None) -> None:
        """Count an answer that has ended. itl_s: seconds between its pieces, if they were read as they came."""
        usage, timings, labels = output.usage, output.timings, (route,)
        for choice in output.choices:
            self._finished[(choice.finish_reason or "abort",)] += 1
        self._prompt_tokens.observe(usage.prompt_tokens)
        self._generation_tokens.observe(usage.completion_tokens)
        for phase, found in self._phases.items():
            if (seconds := getattr(timings, f"{phase}_s")) is not None:
                found.observe(seconds)
        if output.ttft_s is not None:
            self._ttft_s[labels].observe(output.ttft_s)
            self._e2e_s[labels].observe(output.ttft_s + (timings.decode_s or 0.0))
        num_after_first = max((len(choice.token_ids) for choice in output.choices), default=0) - 1
        if timings.decode_s is not None and num_after_first > 0:
            self._per_token_s[labels].observe(timings.decode_s / num_after_first)
        for seconds in itl_s or ():
            self._itl_s[labels].observe(seconds)

    def render(self, stats: Stats, vllm_model: str | None = None) -> bytes:
        """Return the page. stats: `Engine.stats()`, empty when no engine answers. vllm_model: the model's name, where
        vLLM's names are shown, too.
        """
        families = [*self._families(), *engine_families(stats)]
        if vllm_model is not None:
            families += as_vllm_shows(families, vllm_model)
        families += self._process.collect()
        return generate_latest(SimpleNamespace(collect=lambda: families))

    def _families(self) -> Iterator[Metric]:
        yield counter("http_requests", "HTTP requests.", self._requests, ["route", "method", "status"])
        yield _shown("http_request_duration_seconds", "Until the answer's end.", self._http_s, ["route", "method"])
        yield counter("refused_requests", "Requests turned away, by reason.", self._refused, ["reason"])
        yield counter("request_success", "Answers, by how they ended.", self._finished, ["finished_reason"])
        yield _shown("time_to_first_token_seconds", "From arrival to the first token.", self._ttft_s, ["route"])
        yield _shown("inter_token_latency_seconds", "Between two pieces of an answer.", self._itl_s, ["route"])
        text = "Mean time of a token after the first, of each answer."
        yield _shown("request_time_per_output_token_seconds", text, self._per_token_s, ["route"])
        yield _shown("e2e_request_latency_seconds", "From arrival to the last token.", self._e2e_s, ["route"])
        for phase, found in self._phases.items():
            yield histogram(f"request_{phase}_time_seconds", PHASES[phase], {(): found.as_dict()})
        yield histogram("request_prompt_tokens", "Prompt tokens of an answer.", {(): self._prompt_tokens.as_dict()})
        text = "Tokens generated for an answer."
        yield histogram("request_generation_tokens", text, {(): self._generation_tokens.as_dict()})


def _histograms(bounds: tuple[float, ...]) -> defaultdict[Labels, Histogram]:
    return defaultdict(partial(Histogram, bounds))


def _shown(name: str, text: str, found: dict[Labels, Histogram], labels: Sequence[str]) -> Metric:
    return histogram(name, text, {values: one.as_dict() for values, one in found.items()}, labels)
