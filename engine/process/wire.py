"""What every process of ours is told first, what it says when it fails, and exceptions as plain data.

The bytes are msgpack and never name code. Knows no socket and no engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

import kvstore.errors as errors
from kvstore.errors import ConfigError, ContextLengthError, KVStoreError, ModelError, RequestError, StoreLockedError

MAX_MESSAGE_CHARS = 2000


class Start(msgspec.Struct):
    """The first message to a process: what it is to be."""

    silence_s: float  # it is ended after so long without a sign of life
    arguments: dict[str, Any]  # of `Engine`
    store: tuple[str, int, int] | None = None  # path of the directory that the front owns, descriptors with its locks
    rank: int = 0  # of a model in several processes; 0: it is the engine's process
    size: int = 1  # number of ranks
    arena: int | None = None  # descriptor of the first rank's; None: the rank is elsewhere, and KV comes with steps
    rendezvous: str = ""  # where the ranks find each other: see `kvstore.engine.model.parallel.group`
    parent: int | None = None  # id of the process that has started it; None: another machine has

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.size}" if self.rank else "the engine's process"

    @property
    def descriptors(self) -> list[int]:
        """What it inherits."""
        return [*(self.store or ())[1:], *([] if self.arena is None else [self.arena])]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The process could not start, or could not go on, and ends."""

    error: Exception


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


def error_of(failure: Failure, name: str | None = None) -> KVStoreError:
    """The exception again, of the same class. name: of the process that it comes from, for the message."""
    message = failure.message if name is None else f"{name}: {failure.message}"
    error: KVStoreError = getattr(errors, failure.kind)(message, *failure.more)
    return error


def _as_data(error: object) -> Failure:
    if not isinstance(error, Exception):
        raise NotImplementedError(f"{type(error).__name__} is no part of a message")
    return failure_of(error)


def as_error(_: type, data: Any) -> Exception:
    """The hook of decoders of messages that have exceptions in them."""
    return error_of(Failure(*data))


encode = msgspec.msgpack.Encoder(enc_hook=_as_data).encode
decode_start = msgspec.msgpack.Decoder(Start).decode
