"""A clock that stands still until a test sets it."""


class Clock:
    """now_s: seconds since any moment."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
