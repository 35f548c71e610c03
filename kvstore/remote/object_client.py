"""Objects of a bucket or directory, many at once, each call with a deadline. One thread at a time; knows no block.

Raises RemoteError when the store does not answer in time, refuses, or is gone; no text of it has what signs in.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvstore.errors import ConfigError, RemoteError
from kvstore.remote.object_address import ObjectAddress

T = TypeVar("T")
A = TypeVar("A")
CONNECT_S, REQUEST_S, RETRY_S, NUM_RETRIES = 2.0, 10.0, 2.0, 2  # one that was refused for a moment is repeated
LEAVE_S = 0.02
MOST_AT_ONCE = 64
MOST_DELETES = 1000  # in one request, of stores that take many
_NO_ROOM = re.compile(r"os error (28|122)\b")  # a directory's file system is full, or its user's share of it


class NoRoomError(RemoteError):
    """The directory's file system is full. It can be read."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """stored_s: seconds since the epoch, by the store's clock."""

    num_bytes: int
    stored_s: float


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [begin, end) of an object."""

    name: str
    begin: int
    end: int


def open_store(address: ObjectAddress) -> Any:
    """What obstore has for it, for any number of clients. Opens no connection. Raises ConfigError."""
    client = {"timeout": timedelta(seconds=REQUEST_S), "connect_timeout": timedelta(seconds=CONNECT_S)}
    retries = {"max_retries": NUM_RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
    try:
        if address.scheme == "file":
            return LocalStore(address.prefix)
        make: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[address.scheme]
        return make(
            address.bucket, prefix=address.prefix or None, config=dict(address.settings),
            client_options={**client, "allow_http": True}, retry_config=retries,
        )  # fmt: skip
    except (BaseError, OSError, ValueError) as error:
        value = f"{address}, which cannot be opened: {_words(error)}"
        raise ConfigError("remote", value, "look at the address and what signs in there") from None


def _words(error: BaseException) -> str:
    """The first line without the request, in whose address a signature may be, and without the answered page."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    first = str(error).strip().partition("\n")[0].partition("<")[0]
    return re.sub(r"\?\S*", "", first.rpartition(" - ")[2]).strip(" :")[:300] or type(error).__name__


class ObjectClient:
    """store: of `open_store`. Each timeout is of the whole call."""

    def __init__(self, address: ObjectAddress, store: Any) -> None:
        self.address, self._store = address, store
        self._runner, self._places = asyncio.Runner(), asyncio.Semaphore(MOST_AT_ONCE)

    def close(self) -> None:
        """Also lets obstore's threads leave Python: one that still has to when the interpreter ends aborts the process
        (https://github.com/PyO3/pyo3-async-runtimes/issues/40).
        """
        self._runner.close()
        time.sleep(LEAVE_S)

    def infos(self, names: Sequence[str], timeout_s: float) -> list[ObjectInfo | None]:
        """None: it is not there."""
        return self.run(self.look_up(names), timeout_s)

    async def look_up(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """The same, of what `run` runs."""
        return await self._at_once(self._info, names)

    def read(self, spans: Sequence[ByteRange], timeout_s: float) -> list[memoryview | None]:
        """None: it is not there. One that was cut off is shorter."""
        return self.run(self._at_once(self._read, spans), timeout_s)

    def write(self, name: str, data: bytes | bytearray, timeout_s: float) -> None:
        """All of an object or nothing, in place of what was there."""
        self.run(self._write(name, data), timeout_s)

    def renew(self, name: str, timeout_s: float) -> None:
        """Make it as new: buckets have no other way than to store it once more, unless it was deleted meanwhile."""

        async def renew() -> None:
            if self.address.scheme == "file":
                os.utime(os.path.join(self.address.prefix, name))
                return
            got = await obstore.get_async(self._store, name)
            found, data = got.meta, await got.bytes_async()
            as_found: Any = {name: found[name] for name in ("e_tag", "version") if found.get(name) is not None}
            await obstore.put_async(self._store, name, data, mode=as_found, use_multipart=False)

        self.run(renew(), timeout_s)

    def remove(self, names: Sequence[str], timeout_s: float) -> None:
        """Those that are there."""
        self.run(self._remove(names), timeout_s)

    def look(self, prefix: str, timeout_s: float) -> None:
        """Whether it answers: a list of what is below this prefix, as a question for one object says nothing."""

        async def look() -> None:
            async for _ in obstore.list(self._store, prefix):
                return

        self.run(look(), timeout_s)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        try:
            if self.address.scheme == "file" and not os.path.isdir(self.address.prefix):
                work.close()  # else it would be made anew, where something should be mounted
                raise FileNotFoundError("its directory is gone")
            return self._runner.run(asyncio.wait_for(work, timeout_s))
        except (BaseError, OSError) as error:
            is_full = self.address.scheme == "file" and _NO_ROOM.search(str(error))
            raise (NoRoomError if is_full else RemoteError)(f"{self.address}: {_words(error)}") from error

    # -- in the loop -------------------------------------------------------------------------------------------------
    async def _at_once(self, work: Callable[[A], Coroutine[Any, Any, T]], objects: Sequence[A]) -> list[T]:
        async def one(of: A) -> T:
            async with self._places:
                return await work(of)

        return await asyncio.gather(*map(one, objects))

    async def _info(self, name: str) -> ObjectInfo | None:
        try:
            meta = await obstore.head_async(self._store, name)
        except FileNotFoundError:
            return None
        return ObjectInfo(meta["size"], meta["last_modified"].timestamp())

    async def _read(self, span: ByteRange) -> memoryview | None:
        try:
            got = await obstore.get_async(self._store, span.name, options={"range": (span.begin, span.end)})
            return memoryview(await got.bytes_async())
        except FileNotFoundError:
            return None
        except BaseError:  # also if it ends before this span
            info = await self._info(span.name)
            if info is not None and info.num_bytes > span.begin:
                raise
            return None if info is None else memoryview(b"")

    async def _write(self, name: str, data: Any) -> None:
        await obstore.put_async(self._store, name, data, use_multipart=False)

    async def _remove(self, names: Sequence[str]) -> None:
        if self.address.scheme != "s3":
            await self._at_once(self._remove_one, names)
            return
        for start in range(0, len(names), MOST_DELETES):  # those that are not there are no error
            await obstore.delete_async(self._store, list(names[start : start + MOST_DELETES]))

    async def _remove_one(self, name: str) -> None:
        with suppress(FileNotFoundError):
            await obstore.delete_async(self._store, name)
