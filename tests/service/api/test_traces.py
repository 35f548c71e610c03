"""Spans of requests, as a collector of OpenTelemetry gets them."""

import sys

import pytest

from tests.support.redis_server import free_port
from tests.support.service.collector import attributes, collecting
from tests.support.service.serving import serving
from tests.support.service.talking import SHORT

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["queue", "load", "prefill", "decode"]


@pytest.fixture(scope="module")
def sent():
    """The spans of some requests by the id of their trace, and how the server called itself."""
    with collecting() as collector:
        with serving(otlp_traces_endpoint=collector.url) as server:
            for flags in ("01", "00"):  # sampled by whoever asked, or not
                trace = {"traceparent": f"00-{TRACE[:-2]}{flags}-{PARENT}-{flags}", "X-Request-Id": "mine"}
                assert server.post("/chat", {"message": "Hello", **SHORT}, **trace).status == 200
            assert server.post("/v1/completions", {"prompt": ["a", "b"], **SHORT}).status == 200
            assert server.get("/sessions/unknown").status == 404
            assert server.get("/health").status == 200
        traces: dict[str, list] = {}
        for span in collector.spans:
            traces.setdefault(span.trace_id.hex(), []).append(span)
        return traces, collector.services


def named(sent, name):
    """The span of a request, and those below it."""
    (spans,) = [spans for spans in sent[0].values() if any(span.name == name for span in spans)]
    (root,) = [span for span in spans if span.name == name]
    return root, [span for span in spans if span is not root]


def test_a_request_goes_on_with_its_callers_trace(sent):
    root, parts = named(sent, "POST /chat")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (f"{TRACE[:-2]}01", PARENT)
    assert f"{TRACE[:-2]}00" not in sent[0] and sent[1] == {"kvstore"}
    told = attributes(root)
    assert (told["http.response.status_code"], told["kvstore.request_id"]) == (200, "mine")
    assert told["gen_ai.usage.output_tokens"] == 6 and told["kvstore.cached_tokens"] == 0
    assert not {"kvstore.seconds", "kvstore.traceparent"} & set(told)
    assert [part.name for part in sorted(parts, key=lambda part: part.end_time_unix_nano)] == PHASES


def test_its_phases_follow_one_another_within_it(sent):
    root, parts = named(sent, "POST /chat")
    times = {part.name: (part.start_time_unix_nano, part.end_time_unix_nano) for part in parts}
    edges = [root.start_time_unix_nano, *(edge for phase in PHASES for edge in times[phase]), root.end_time_unix_nano]
    assert edges == sorted(edges) and {part.parent_span_id for part in parts} == {root.span_id}
    assert times["prefill"][1] > times["prefill"][0] and times["decode"][1] > times["decode"][0]


def test_each_answer_has_phases_and_a_request_without_any_has_none(sent):
    root, parts = named(sent, "POST /v1/completions")
    assert sorted(part.name for part in parts) == sorted(2 * PHASES) and not root.parent_span_id
    root, parts = named(sent, "GET /sessions/{id}")
    assert parts == [] and attributes(root)["error.type"] == "session_not_found"


def test_polls_have_no_spans(sent):
    assert len(sent[0]) == 3


def test_a_collector_that_is_away_keeps_nobody_waiting():
    with serving(otlp_traces_endpoint=f"http://127.0.0.1:{free_port()}/v1/traces") as server:
        assert server.post("/chat", {"message": "Hello", **SHORT}).status == 200


def test_without_the_extra_the_message_names_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    code, _, said = run("serve", "--disk", "0", "--otlp-traces-endpoint", "http://localhost:4318/v1/traces")
    assert code == 2 and said.count("\n") == 1 and "--otlp-traces-endpoint" in said and "kvstore-llm[otel]" in said


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://localhost:4317", "http://", "http://a b"])
def test_what_is_no_url_of_such_a_collector_is_refused(run, url):
    code, _, said = run("serve", "--otlp-traces-endpoint", url)
    assert code == 2 and "http://localhost:4318/v1/traces" in said
