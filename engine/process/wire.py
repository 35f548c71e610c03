"""Exceptions as plain data, as they cross between processes. Knows no socket and no engine."""

from __future__ import annotations

import msgspec

import kvstore.errors as errors
from kvstore.errors import ConfigError, ContextLengthError, KVStoreError, ModelError, RequestError, StoreLockedError

MAX_MESSAGE_CHARS = 2000


class Failure(msgspec.Struct, array_like=True):
    """An exception."""

    kind: str  # name of its class
    message: str
    more: tuple[str | int | dict[str, str | int] | None, ...] = ()  # its arguments after the message


def failure_of(error: BaseException) -> Failure:
    """An exception as data, without its trace. An error that is no KVStoreError becomes one that names its class."""
    message = str(error)[:MAX_MESSAGE_CHARS]
    if not isinstance(error, KVStoreError):
        return Failure("KVStoreError", f"the engine failed: {type(error).__name__}: {message}")
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    if isinstance(error, ConfigError | ModelError):
        first, *more = (part[:MAX_MESSAGE_CHARS] if isinstance(part, str) else part for part in error.args)
        return Failure(kind, first, tuple(more))
    if isinstance(error, ContextLengthError):
        return Failure(kind, message, (error.requested_tokens, error.limit_tokens))
    if isinstance(error, StoreLockedError):
        return Failure(kind, message, (error.pid,))
    return Failure(kind, message, (error.param,) if isinstance(error, RequestError) else ())


def error_of(failure: Failure) -> KVStoreError:
    """The exception again, of the same class."""
    error: KVStoreError = getattr(errors, failure.kind)(failure.message, *failure.more)
    return error
