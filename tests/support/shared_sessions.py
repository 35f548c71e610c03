"""Stores of sessions that share a Redis, as servers of one fleet have them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.remote.address import RedisAddress
from kvstore.sessions.shared.address import SessionAddress
from kvstore.sessions.shared.opening import open_shared
from kvstore.sessions.shared.server import Durability
from kvstore.sessions.store import SessionStore
from tests.children.session_child import Clock
from tests.support.redis_server import RedisServer

SECRET = b"s" * 32
SECRET_TEXT = "the secret of this fleet, 32 characters"
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def secret_file(folder: Path) -> str:
    """A file with the fleet's secret, as `--fleet-secret-file` takes it."""
    path = folder / "secret"
    path.touch(0o600)
    path.write_text(SECRET_TEXT)
    return str(path)


def shared_store(
    redis: RedisServer | SessionAddress | int,
    directory: Path | None = None,
    clock: Callable[[], float] | None = None,
    lease_s: float = 10.0,
    secret: bytes = SECRET,
    level: str = "unchecked",
    num_replicas: int | None = None,
) -> SessionStore:
    """redis: or its address, or the port of one. directory: of the server's own store."""
    if not isinstance(redis, SessionAddress):
        redis = SessionAddress((RedisAddress("127.0.0.1", redis if isinstance(redis, int) else redis.port),))
    shared = open_shared(redis, Durability(level, num_replicas), secret, directory, lease_s)
    return SessionStore(None, clock or Clock(), shared=shared)


def answers_without_a_store(said: list[list[str]], max_tokens: int) -> list[list[str]]:
    """What the built-in model answers to each of these conversations, greedily."""
    from kvstore import CacheTiers, Engine, SamplingParams  # loads torch, which processes of tests start without

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with Engine(cache_tiers=CacheTiers(hbm="16MiB"), device="cpu") as engine:
        talks = [engine.chat(f"talk-{index}") for index in range(len(said))]
        with ThreadPoolExecutor(8) as together:
            sent = together.map(lambda talk, texts: [talk.send(text, params).text for text in texts], talks, said)
            return list(sent)
