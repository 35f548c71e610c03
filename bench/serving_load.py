"""People who talk to a server over HTTP, many at a time: conversations, think times, and the times of each turn.

Uses /v1/chat/completions like any client, with the whole history as text in every request. Knows no engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIERS = ("hbm", "cpu", "disk", "reencoded")


@dataclass(frozen=True, slots=True)
class Load:
    """The people, and what they send."""

    loop: str  # "closed": `num_clients` conversations at a time; "open": `rate` new ones a second, whatever still runs
    num_conversations: int
    num_turns: int
    num_clients: int
    rate: float
    think_s: float  # mean of an exponential pause before each further turn
    vocabulary: Sequence[str]  # words of the messages
    first_words: int  # number of words of the first message
    words: int  # and of each further one
    max_tokens: int
    seed: int = 0


@dataclass(slots=True)
class TurnResult:
    """One turn as its client saw it."""

    turn: int
    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between its content events
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    error: str = ""  # why it failed

    @property
    def cached(self) -> dict[str, int]:
        details = self.usage.get("prompt_tokens_details", {}).get("cached_tokens_details", {})
        return {tier: details.get(tier, 0) for tier in TIERS}


class Client:
    """Talks to one server. salted: every request has a salt of its own, so that nothing hits in any cache."""

    def __init__(self, url: str, session: aiohttp.ClientSession, load: Load, salted: bool = False) -> None:
        self._url = url
        self._session = session
        self._load = load
        self._salted = salted
        self._num_sent = 0
        self.results: list[TurnResult] = []

    async def turn(self, messages: list[dict[str, str]], number: int) -> TurnResult:
        """Run one streamed request, and keep its result."""
        self._num_sent += 1
        body: dict[str, Any] = {
            "messages": messages, "max_tokens": self._load.max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        if self._salted:
            body["cache_salt"] = f"salt-{self._num_sent}"
        result = TurnResult(number)
        self.results.append(result)
        try:
            await self._read(body, result)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            result.error = f"{type(error).__name__}: {error}"[:200]
        return result

    async def _read(self, body: dict[str, Any], result: TurnResult) -> None:
        started = last = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as reply:
            if reply.status != 200:
                result.error = f"{reply.status}: {(await reply.text())[:200]}"
                return
            async for line in reply.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now, event = time.perf_counter(), json.loads(line[6:])
                if "error" in event:
                    result.error = str(event["error"])[:200]
                    return
                if event.get("usage"):
                    result.usage = event["usage"]
                text = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if text:
                    if result.text:
                        result.gaps_s.append(now - last)
                    else:
                        result.ttft_s = now - started
                    result.text, last = result.text + text, now
        result.total_s = time.perf_counter() - started
        if not result.usage:
            result.error = "the stream ended without usage"


@dataclass(slots=True)
class Conversation:
    """What one person has said and heard so far."""

    number: int
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, load: Load, turn: int) -> None:
        """The next message: words drawn by conversation and turn, so that every arm sends the same."""
        rng = random.Random(f"{load.seed}-{self.number}-{turn}")
        count = load.first_words if turn == 1 else load.words
        self.messages.append({"role": "user", "content": " ".join(rng.choices(load.vocabulary, k=count))})


async def talk(
    client: Client, load: Load, conversations: Sequence[Conversation], first_turn: int, last_turn: int
) -> float:
    """Run turns first_turn to last_turn of these conversations. Returns the seconds that took."""
    started = time.perf_counter()
    if load.loop == "open":
        rng = random.Random(load.seed)
        tasks = []
        for conversation in conversations:
            tasks.append(asyncio.create_task(_one(client, load, conversation, first_turn, last_turn)))
            await asyncio.sleep(rng.expovariate(load.rate))
        await asyncio.gather(*tasks)
    else:
        waiting = list(reversed(conversations))

        async def person() -> None:
            while waiting:
                await _one(client, load, waiting.pop(), first_turn, last_turn)

        await asyncio.gather(*(person() for _ in range(load.num_clients)))
    return time.perf_counter() - started


async def _one(client: Client, load: Load, conversation: Conversation, first_turn: int, last_turn: int) -> None:
    rng = random.Random(f"think-{load.seed}-{conversation.number}")
    for turn in range(first_turn, last_turn + 1):
        if turn > 1 and load.think_s:
            await asyncio.sleep(rng.expovariate(1 / load.think_s))
        conversation.say(load, turn)
        result = await client.turn(conversation.messages, turn)
        if result.error:
            return
        conversation.messages.append({"role": "assistant", "content": result.text})


def new_session(key: str | None = None) -> aiohttp.ClientSession:
    """Connections without a limit, answers without a deadline below ten minutes. key: of a tenant."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=600))
