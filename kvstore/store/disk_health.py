"""Whether the disk can be written, and when what failed is tried again: after a longer while each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0


@dataclass(slots=True)
class Backoff:
    """When something that failed is tried again."""

    clock: Callable[[], float]
    at_s: float = 0.0
    next_s: float = FIRST_RETRY_S

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.at_s

    def failed(self) -> None:
        self.at_s = self.clock() + self.next_s
        self.next_s = min(2 * self.next_s, LAST_RETRY_S)

    def succeeded(self) -> None:
        self.at_s, self.next_s = 0.0, FIRST_RETRY_S


class DiskHealth:
    """error: why nothing can be written, None when it can. write, heal: of transactions, and of putting a damaged file
    aside.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.error: str | None = None
        self.write, self.heal = Backoff(clock), Backoff(clock)

    @property
    def is_paused(self) -> bool:
        """Writing has failed, and is not tried again for a while."""
        return self.error is not None and not (self.write.is_over and self.heal.is_over)

    def write_failed(self, error: str) -> None:
        self.error = error
        self.write.failed()

    def heal_failed(self, error: str) -> None:
        self.error = error
        self.heal.failed()

    def recovered(self) -> None:
        """A transaction has succeeded, or there is a new file."""
        self.error = None
        self.write.succeeded()
        self.heal.succeeded()
