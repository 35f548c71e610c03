"""Every exception a caller of kvstore or engine may see. Messages name the thing, the value and the remedy.

KVStoreError
├── ConfigError            an option or a file that describes the set-up is wrong (also a ValueError)
├── ModelError             the model that was given cannot be loaded
│   ├── HubError                its files do not come from the hub: another time they may
│   └── UnsupportedModelError   it loads, but its attention cannot be served by position-free keys
├── RequestError           one request is wrong; nothing else is affected (also a ValueError)
│   ├── ContextLengthError      it does not fit the context window or the HBM pool
│   ├── SessionBusyError        another turn of this session runs
│   ├── SessionNotFoundError    there is no such session, or it was deleted
│   └── SessionExistsError      the id is taken
├── StoreError             a store's files cannot be opened or used
│   ├── StoreLockedError        another process owns the store; its pid is in the message
│   ├── SessionDamagedError     records of a session cannot be read; the message says which turns are whole
│   ├── SessionTakenError       another server writes to the session now: a turn that was computed is not stored
│   ├── RemoteError             a server that stores share cannot be reached, or refuses
│   └── DegradedError           the disk tier cannot write at the moment: what was to be made durable is not
│       ├── DiskFullError           its file system is full; the message has both sizes
│       └── StoreLostError          its files were removed or replaced while it was open: nothing more is kept
├── EngineClosedError      the engine was closed, or its thread died
├── EngineDiedError        the engine's own process has ended; it is started again, once
└── EngineOverloadedError  more requests or calls than the engine's own process takes at once
"""

from collections.abc import Callable, Mapping

__all__ = [
    "ConfigError", "ContextLengthError", "DegradedError", "DiskFullError", "EngineClosedError", "EngineDiedError",
    "EngineOverloadedError", "HubError", "KVStoreError", "ModelError", "RemoteError", "RequestError",
    "SessionBusyError", "SessionDamagedError", "SessionExistsError", "SessionNotFoundError", "SessionTakenError",
    "StoreError", "StoreLockedError", "StoreLostError", "UnsupportedModelError"
]  # fmt: skip
Settings = Mapping[str, str | int]  # to be given, by their names in Python


def in_python(field: str, value: str | int | None) -> str:
    """A setting, and where it is to be given its value, as a program writes it."""
    return field if value is None else f"{field}={value}"


def _remedy(remedy: str | Settings, write: Callable[[str, str | int | None], str]) -> str:
    return remedy if isinstance(remedy, str) else "give " + " and ".join(write(*one) for one in remedy.items())


class KVStoreError(Exception):
    """Root of the tree. `args` are the arguments of its class, the message first: so it crosses to another process."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConfigError(KVStoreError, ValueError):
    """An option, or a file that describes the set-up, is wrong.

    field: the option, by its name in Python. value: what it is, in words. remedy: what to do, in words, or what else to
    give. Of an error about something else, field is the whole text.
    """

    def __init__(self, field: str, value: str = "", remedy: str | Settings = "") -> None:
        super().__init__(field, value, remedy)
        self.field, self.value, self.remedy = field, value, remedy

    def told(self, write: Callable[[str, str | int | None], str]) -> str:
        """The message with its options as `write` shows them; a value comes with those to be given."""
        if not self.value:
            return self.field
        return f"{write(self.field, None)} is {self.value}; {_remedy(self.remedy, write)}"

    def __str__(self) -> str:
        return self.told(in_python)


class ModelError(KVStoreError):
    """The model directory or hub id cannot be loaded. remedy: with which options it could be."""

    def __init__(self, text: str, remedy: Settings | None = None) -> None:
        super().__init__(text, remedy)
        self.text, self.remedy = text, remedy

    def told(self, write: Callable[[str, str | int | None], str]) -> str:
        """As `ConfigError.told`."""
        return self.text if self.remedy is None else f"{self.text}; {_remedy(self.remedy, write)}"

    def __str__(self) -> str:
        return self.told(in_python)


class HubError(ModelError):
    """The hub cannot be reached, or fetching the model from it has failed: no fault of the model's name."""


class UnsupportedModelError(ModelError):
    """The architecture is refused: no rotary embedding was found, or the probe failed."""


class RequestError(KVStoreError, ValueError):
    """One request is wrong. `param` names the field, as in the OpenAI error shape."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param


class ContextLengthError(RequestError):
    """A request does not fit: `requested_tokens` against `limit_tokens`."""

    def __init__(self, message: str, requested_tokens: int, limit_tokens: int) -> None:
        super().__init__(message, "messages")
        self.args = (message, requested_tokens, limit_tokens)
        self.requested_tokens = requested_tokens
        self.limit_tokens = limit_tokens


class SessionBusyError(RequestError):
    """A session has one turn at a time. retry_after_s: when it may be free; None if nobody knows."""

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param)
        self.args = (message, param, retry_after_s)
        self.retry_after_s = retry_after_s


class SessionNotFoundError(RequestError):
    """There is no session of this id, or not any more."""


class SessionExistsError(RequestError):
    """A session cannot be created under the id of another one."""


class StoreError(KVStoreError):
    """A store cannot be opened or used; the message names the path and the remedy."""


class StoreLockedError(StoreError):
    """Another owner holds the store. `pid` is its process, None when it is not known."""

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message, pid)
        self.pid = pid


class SessionDamagedError(StoreError):
    """Records of a session cannot be read, and never will be; what to do stands in the message."""


class SessionTakenError(StoreError):
    """Another server has taken a session over from one that gave no sign of life; the turn that ran is not stored."""


class RemoteError(StoreError):
    """A shared server did not answer in time, refused or sent what cannot be read; the message names it, no secret."""


class DegradedError(StoreError):
    """The disk tier cannot write (full, read-only, failing): serving goes on, durability does not."""


class DiskFullError(DegradedError):
    """The file system of the store is full; the message says of which size, and names no path."""


class StoreLostError(DegradedError):
    """Files of the store were removed or replaced while it was open: new data would not be found again."""


class EngineClosedError(KVStoreError):
    """The engine can take no more requests."""


class EngineDiedError(KVStoreError):
    """The process of the engine has ended: what ran is lost, stored turns are not."""


class EngineOverloadedError(KVStoreError):
    """The process of the engine takes no more at the moment; try again."""
