"""The benchmark's clients against a real server: what they report is what happened."""

import asyncio

import pytest

from bench.serving_load import Client, Conversation, Load, new_session, talk
from tests.support.service.serving import serving


def load(**changes):
    known = {
        "loop": "closed", "num_conversations": 4, "num_turns": 3, "num_clients": 2, "rate": 50.0, "think_s": 0.001,
        "vocabulary": ["tea", "red", "Oslo"], "first_words": 20, "words": 5, "max_tokens": 6,
    }  # fmt: skip
    return Load(**(known | changes))


@pytest.fixture(scope="module")
def server():
    with serving() as one:
        yield one


def run(server, chosen, salted=False, first_turn=1, talks=None):
    talks = [Conversation(number) for number in range(chosen.num_conversations)] if talks is None else talks

    async def whole():
        async with new_session() as session:
            client = Client(server.url, session, chosen, salted)
            await talk(client, chosen, talks, first_turn, chosen.num_turns)
            return client.results

    return asyncio.run(whole()), talks


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_every_turn_of_every_conversation_is_reported_with_its_hits(server, loop):
    chosen = load(loop=loop, seed=len(loop))
    results, talks = run(server, chosen)
    assert sorted(one.turn for one in results) == sorted([1, 2, 3] * 4) and not any(one.error for one in results)
    assert all(0 < one.ttft_s <= one.total_s for one in results)
    assert all(one.usage["completion_tokens"] == 6 for one in results)
    assert all(sum(one.cached.values()) > 0 for one in results if one.turn > 1)
    assert all(len(talk.messages) == 6 for talk in talks)


def test_under_a_salt_nothing_is_ever_found(server):
    results, _ = run(server, load(seed=9), salted=True)
    assert [sum(one.cached.values()) for one in results] == [0] * 12


def test_what_fails_is_reported_and_ends_its_conversation(server):
    results, _ = run(server, load(first_words=2000))
    assert [one.turn for one in results] == [1] * 4
    assert all(one.error.startswith("400") for one in results)
