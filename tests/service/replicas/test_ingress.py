"""Answers on their way from a replica to Ray's proxy. Behind Ray itself: test_ray."""

import asyncio
import json

import pytest

from tests.support.service.replicas import needs_ray

pytestmark = [pytest.mark.ray, needs_ray, pytest.mark.filterwarnings("ignore")]  # of what Ray imports
FIRST, SECOND = b'event: piece\ndata: {"text": "one"}\n\n', b'data: {"text": "two"}\n\n'


class Dying:
    """Ray's answer of a replica that gives these pieces and dies."""

    def __init__(self, *pieces):
        self._pieces = pieces

    async def __aiter__(self):
        from ray.exceptions import RayActorError

        for piece in self._pieces:
            yield piece
        raise RayActorError()

    def cancel(self):
        """It has died."""


def sent(kind, *pieces):
    from kvstore.service.replicas.ingress import Relayed
    from kvstore.service.replicas.replica import Head

    found = []

    async def send(message):
        found.append(message)

    async def relay():
        await Relayed(Dying(Head(200, [(b"Content-Type", kind)]), *pieces))({}, None, send)

    try:
        asyncio.run(relay())
    finally:
        start, *bodies = found
        assert start["status"] == 200
        assert all(body["body"] or body is bodies[-1] for body in bodies)
    return b"".join(body["body"] for body in bodies)


@pytest.mark.parametrize("cut", [1, 9, len(SECOND) - 1, len(SECOND)])
def test_a_stream_ends_with_whole_events_when_its_replica_is_lost(cut):
    whole = FIRST + SECOND if cut == len(SECOND) else FIRST
    for pieces in (
        (FIRST + SECOND[:cut],),
        (FIRST[:5], FIRST[5:], SECOND[:cut]),
        (FIRST, SECOND[:1][:cut], SECOND[1:cut]),
    ):
        said = sent(b"text/event-stream; charset=utf-8", *pieces)
        assert said.startswith(whole) and said.endswith(b"\n\n")
        name, data = said[len(whole) :].removesuffix(b"\n\n").split(b"\ndata: ")
        told = json.loads(data)
        assert (name, told["type"], told["error"]["code"]) == (b"event: error", "error", "replica_lost")


def test_an_answer_that_is_no_stream_is_cut_off():
    from ray.exceptions import RayActorError

    with pytest.raises(RayActorError):
        sent(b"application/json", b'{"text": "on')
