"""Streams of events: their bytes, errors before and after the headers, and readers that are slow."""

import threading
import time
from contextlib import suppress
from itertools import pairwise

import pytest

from kvstore.errors import ContextLengthError
from kvstore.service.api.exchange import EventStream
from kvstore.service.http.errors import ApiError, Route
from tests.support.service.serving import Plain, raw_request, read_to_end, server_fixture, serving

BIG = "x" * 10_000
WRITE_S = 2.0
ends: list[str] = []  # how the handlers below ended


def stream(path):
    """A route of a handler that is given its events."""

    def route_of(function):
        async def handle(request):
            try:
                async with EventStream(request, Plain(path != "/bare")) as events:
                    await function(events)
            except BaseException as error:
                ends.append(type(error).__name__)
                raise
            ends.append("ok")
            return events.response

        return Route("GET", path, handle, "user", "")

    return route_of


@stream("/good")
async def good(events):
    assert not events.response.prepared
    await events.send({"text": "é\n\n😀"})
    assert events.response.prepared
    await events.send({"n": 1}, event="response.created")


@stream("/bare")
async def bare(events):
    await events.send({"n": 1})


@stream("/early")
async def early(events):
    raise ContextLengthError("the prompt has 9 tokens, but the window has 8", 9, 8)


@stream("/late")
async def late(events):
    await events.send({"n": 1})
    raise ApiError(503, "no more", type="server_error", code="stopped")


@stream("/bug")
async def bug(events):
    await events.send({"n": 1})
    raise RuntimeError("secret")


@stream("/endless")
async def endless(events):
    while True:
        await events.send({"text": BIG})


ROUTES = (good, bare, early, late, bug, endless)


server = server_fixture(routes=ROUTES)


@pytest.fixture(autouse=True)
def fresh():
    ends.clear()


def test_the_bytes_of_a_stream(server):
    reply = server.get("/good")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-request-id"]
    said = 'data: {"text":"é\\n\\n😀"}\n\nevent: response.created\ndata: {"n":1}\n\ndata: [DONE]\n\n'
    assert reply.body.decode() == said
    assert reply.events() == [{"text": "é\n\n😀"}, {"n": 1}, "[DONE]"]


def test_a_stream_without_its_last_line(server):
    assert server.get("/bare").events() == [{"n": 1}]


def test_an_error_before_the_first_event_has_its_status(server):
    reply = server.get("/early")
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "messages")


def test_an_error_after_it_is_an_event(server):
    reply = server.get("/late")
    assert reply.status == 200
    first, error, last = reply.events()
    assert (first, last) == ({"n": 1}, "[DONE]")
    assert error == {"error": {"message": "no more", "type": "server_error", "param": None, "code": "stopped"}}
    assert ends == ["ApiError"]


def test_nothing_of_a_bug_is_told(server):
    _, error, last = server.get("/bug").events()
    assert error["error"]["code"] == "internal_error" and last == "[DONE]"
    assert b"secret" not in server.get("/bug").body


def test_the_connection_serves_the_next_request_after_a_stream(server):
    raw = server.connect()
    raw.sendall(raw_request("GET", "/late") + raw_request("GET", "/good", Connection="close"))
    assert read_to_end(raw).count(b"data: [DONE]") == 2
    raw.close()


def test_a_reader_that_stops_reading_is_dropped_and_holds_little():
    with serving(routes=ROUTES, write_timeout_s=0.3) as server:
        raw = server.connect(receive_bytes=4096)
        raw.sendall(raw_request("GET", "/endless"))
        server.wait_until(lambda: len(ends) == 1, "the handler has ended")
        assert ends[0] in ("CancelledError", "ReaderGone")
        server.wait_until_idle()
        server.wait_until(lambda: not server.server.connections, "the connection is gone")
        assert len(read_to_end(raw)) < 4 * 2**20
        raw.close()


def read_slowly(server) -> tuple[bool, float]:
    """For longer than the server waits, in all. Whether it was served as long, and its longest pause."""
    ends.clear()
    times, is_served = [time.monotonic()], False
    with server.connect(receive_bytes=4096) as raw, suppress(ConnectionError):
        raw.sendall(raw_request("GET", "/endless"))
        for _ in range(25):
            if not all(raw.recv(4096) for _ in range(32)):
                break
            times.append(time.monotonic())
            threading.Event().wait(0.1)
        else:
            is_served = ends == []
    times.append(time.monotonic())
    server.wait_until(lambda: len(ends) == 1)
    return is_served, max(later - earlier for earlier, later in pairwise(times))


def test_a_slow_reader_that_does_read_is_not():
    """Where it could not read for a while, on a busy machine, it comes again."""
    with serving(routes=ROUTES, write_timeout_s=WRITE_S) as server:
        is_served = longest_s = None
        while not is_served:
            assert longest_s is None or longest_s > WRITE_S / 2, "it has read all the time"
            is_served, longest_s = read_slowly(server)
