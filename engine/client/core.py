"""`Core`: what computes, wherever it runs. Token ids only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

from kvstore.engine.client.messages import Call, Facts, Submit
from kvstore.engine.core.news import Update

R = TypeVar("R")
State = Literal["starting", "running", "restarting", "failed", "closed"]


class Core(Protocol):
    """Scheduler, model and tiers. Any thread may call it.

    on_news: called while there is something to take, by one thread at a time, which `is_reader`. life: changes when the
    core restarts and forgets pins and expiry times.
    """

    on_news: Callable[[], None]

    @property
    def facts(self) -> Facts: ...

    @property
    def life(self) -> int: ...

    @property
    def state(self) -> State:
        """ "running"; "restarting"; "failed" if its process has ended more than max_restarts times within an hour,
        failed restarts included, or if a rank has; "closed". Of several that of the one that is best off.
        """

    @property
    def pid(self) -> int | None:
        """Of its own process; None while it has none, or if it has several."""

    @property
    def silent_s(self) -> float:
        """Seconds since its own process gave its last sign of life, due every half second; 0 without one."""

    @property
    def is_reader(self) -> bool:
        """Whether this thread is the one that takes news: it must not wait for any."""

    def check_open(self) -> None:
        """Raises EngineClosedError, or EngineDiedError where its process has ended."""

    def submit(self, prompts: Sequence[Submit]) -> None:
        """Queue checked prompts, which share a step if there is room. Never waits.

        Raises as `check_open`, and EngineOverloadedError. Some of them may then have to be ended.
        """

    def end(self, request_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        """End a prompt, or one choice of it: at a stop string, or as aborted. Never waits; its news say when it has.

        Does nothing for a prompt that has ended. Raises EngineClosedError.
        """

    def call(self, verb: Call[R]) -> R:
        """Carry out one of the verbs in `messages`. Waits for the result. Raises what the verb raises, and as
        `submit`.
        """

    def take_news(self) -> list[Update]:
        """What has come since the last call."""

    def fileno(self) -> int:
        """A descriptor that is readable while there is news, once `read_here` has returned True."""

    def read_here(self) -> bool:
        """From now on only this thread takes news, and must not wait for the core in any other way. False where the
        thread that steps takes them.
        """

    def close(self) -> None:
        """End running requests as aborted, and give back its share of the store."""
