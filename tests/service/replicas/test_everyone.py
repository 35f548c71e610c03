"""One answer made of all replicas' answers."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.service.replicas.replica import Head, Whole
from kvstore.service.replicas.routing import concerns_everyone, joined

JSON = [(b"Content-Type", b"application/json")]


def answer(name, status, body):
    return Whole(name, Head(status, JSON), body if isinstance(body, bytes) else json.dumps(body).encode())


def health(name, status, *reasons):
    return answer(name, 200 if status in ("ok", "degraded") else 503, {"status": status, "reasons": list(reasons)})


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["ok", "ok"], (200, "ok")),
        (["ok", "degraded"], (200, "degraded")),
        (["failed", "ok"], (200, "degraded")),
        (["starting", "failed"], (503, "failed")),
        (["stopping", "stopping"], (503, "stopping")),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/healthz", "/livez", "/ping"])
def test_a_fleet_works_while_one_replica_does(path, states, expected):
    head, body = joined(path, [health(f"replica-{i}", state, f"r{i}") for i, state in enumerate(states)])
    told = json.loads(body)
    assert (head.status, told["status"], told["reasons"]) == (*expected, ["r0", "r1"])
    assert told["replicas"]["replica-1"] == {"status": states[1], "reasons": ["r1"]}


def test_it_is_ready_as_soon_as_one_replica_is():
    ready, waits = answer("replica-0", 200, {"ready": True}), answer("replica-1", 503, {"ready": False})
    assert joined("/ready", [waits, ready])[0].status == 200
    assert joined("/ready", [waits, waits])[0].status == 503


def test_metrics_name_their_replica_and_are_one_valid_page():
    page = b"# HELP a_total Some.\n# TYPE a_total counter\na_total %d.0\n" + (
        b'# HELP b Some.\n# TYPE b histogram\nb_bucket{le="1.0",r="}{ "} 1.0\nb_bucket{le="+Inf",r="}{ "} %d.0\n'
        b'b_sum{r="}{ "} 1.0\nb_count{r="}{ "} 2.0\n'
    )
    head, body = joined("/metrics", [answer("replica-1", 200, page % (3, 4)), answer("replica-0", 200, page % (1, 2))])
    found = {family.name: family.samples for family in text_string_to_metric_families(body.decode())}
    assert {name: len(samples) for name, samples in found.items()} == {"a": 2, "b": 8}
    assert {(one.labels["replica"], one.value) for one in found["a"]} == {("replica-0", 1.0), ("replica-1", 3.0)}
    assert {one.labels["r"] for one in found["b"]} == {"}{ "}
    assert head.status == 200


def test_the_administrator_s_answers_stand_by_name_and_an_error_stands_for_all():
    fine, refused = answer("replica-0", 200, {"flushed": True}), answer("replica-1", 403, {"error": {"code": "no"}})
    assert json.loads(joined("/admin/flush", [fine])[1]) == {"replicas": {"replica-0": {"flushed": True}}}
    head, body = joined("/admin/flush", [fine, refused])
    assert (head.status, json.loads(body)) == (403, {"error": {"code": "no"}})
    assert joined("/metrics", [fine, refused])[0].status == 403


def test_why_is_told_by_the_replica_that_had_the_request():
    unknown, known = answer("replica-0", 404, {"error": {"code": "no"}}), answer("replica-1", 200, {"reason": "new"})
    for answers in ([unknown, known], [known, unknown]):
        assert json.loads(joined("/requests/abc/why", answers)[1]) == {"reason": "new"}
    assert joined("/requests/abc/why", [unknown, unknown])[0].status == 404


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/admin/stats"])
@pytest.mark.parametrize(
    ("status", "body"), [(403, b'{"error": {"code": "host_not_allowed"}}'), (405, b'{"error": {}}'), (204, b"")]
)
def test_what_each_replica_refuses_and_a_preflight_are_answered_as_by_one(path, status, body):
    answers = [answer(f"replica-{number}", status, body) for number in range(2)]
    assert joined(path, answers) == (Head(status, JSON), body)


def test_without_replicas_it_is_starting():
    head, body = joined("/health", [])
    assert (head.status, json.loads(body)["error"]["code"]) == (503, "starting")


def test_what_concerns_everyone():
    assert all(map(concerns_everyone, ("/health", "/ready", "/metrics", "/admin/stats", "/requests/1/why")))
    assert not any(map(concerns_everyone, ("/chat", "/sessions", "/", "/administration")))
