"""Conversations of tests: turns until the window is full, and what is left of them anywhere."""

from unittest import mock

from kvstore import Engine
from kvstore.engine.sessions.chat import ChatSession
from kvstore.errors import StoreError
from tests.support.arenas import whole
from tests.support.engines import check_closed, greedy

PARAMS = greedy(10)
SYSTEM = "Be brief."
LONG = "This is message number one of a talk."


def talk(chat: ChatSession, num_turns: int, word: str = "talk") -> list:
    first = chat.num_turns
    return [chat.send(f"This is message number {first + i} of a {word}.", PARAMS) for i in range(num_turns)]


def fill_over(chat: ChatSession, word: str = "talk"):
    """Turns until one is truncated; that one's output."""
    before = chat.truncated_tokens
    while chat.truncated_tokens == before:
        (out,) = talk(chat, 1, word)
    return out


def fill(chat: ChatSession) -> None:
    """Turns until LONG does not fit any more."""
    chat.truncation = "disabled"
    while True:
        asked = (
            chat.chats.client,
            chat.chats.language.chat_template(),
            [{"role": "user", "content": LONG}],
            PARAMS,
            "",
            "disabled",
            "reencode",
        )
        if len(chat.window.next_turn(*asked).prompt) + PARAMS.max_tokens > chat.chats.client.facts.max_request_tokens:
            break
        chat.send(f"This is message number {chat.num_turns} of a talk.", PARAMS)
    chat.truncation = "auto"


def failing_to_store(engine: Engine, what: str = "commit_turn"):
    """In here this verb of the sessions fails; turns cannot be stored."""
    return mock.patch.object(engine.sessions, what, side_effect=StoreError("injected"))


def num_stored(engine: Engine) -> int:
    engine.flush()
    return check_closed(engine, {engine.facts.root("")})


def nothing_is_left(engine: Engine) -> bool:
    """Neither in a tier nor in HBM's bytes."""
    caches = [cache for layer in engine.loop.runner.caches for cache in layer]
    is_zero = not any(bool(cache.any()) for cache in caches)
    return is_zero and num_stored(engine) == 0 and engine.loop.pool.num_cached == 0


def kv_of(engine: Engine, chain: list[bytes]) -> dict[bytes, list[bytes]]:
    """What to look for of each block: a run of its values and its raw keys as the arena has them, and its ids."""
    connector, found = engine.connector, {}
    with connector.parts.lock:
        for block_id in chain:
            arena_block = connector.parts.cpu.arena_block_of(block_id)
            if arena_block is not None:
                layer = whole(connector.parts.arena)[arena_block, 1]
                found[block_id] = [layer[side, 3].numpy().tobytes() for side in (0, 1)]
    return found


def hbm_bytes(engine: Engine) -> bytes:
    return b"".join(cache.numpy().tobytes() for layer in engine.loop.runner.caches for cache in layer)


def places(engine: Engine, path) -> dict[str, bytes]:
    files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*.mdb") if p.name == "data.mdb"}
    return {"hbm": hbm_bytes(engine), "arena": bytes(engine.connector.parts.arena._memory), **files}


def check_gone(engine: Engine, path, needles: list[bytes]) -> None:
    engine.admin.compact()
    for name, content in places(engine, path).items():
        assert not any(needle in content for needle in needles), f"something of the session is left in {name}"


def check_there(engine: Engine, path, needles: list[bytes]) -> None:
    found = places(engine, path).values()
    assert all(any(needle in content for content in found) for needle in needles), "the test looks for nothing"
