"""One transaction on the shared tables: what it has read, to be compared at its end, and what it will write.

In Redis, a table is a sorted set of its keys, and a hash of its values unless it holds keys only.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import groupby, islice, takewhile
from operator import itemgetter

from kvstore.errors import RemoteError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.shared.connection import Arg, Reply
from kvstore.sessions.shared.names import LEASES, Names
from kvstore.sessions.shared.server import Command
from kvstore.sessions.tables import HEADS, KEYS_ONLY, TABLES, Place, be64, name_key

Ask = Callable[..., list[Reply]]
Entry = tuple[bytes, bytes | None]
KEYS_AT_ONCE, VALUES_AT_ONCE = 512, 32
MAX_OWN = 16  # of keys that one transaction takes out below one prefix
NUMBERS_AT_ONCE = 64  # of new sessions: servers that each take one at a time would all change one record
ALL_ONES = b"\xff" * 64  # longer than what follows any prefix

# KEYS: the prefix, the server's own key for its last commit. ARGV: the number of this commit, how many comparisons
# follow, for each a table, a key and the digest of its value ("" for none); then an operation, table, key and value
# each. 1: all is written; 0: something is not as it was read, and nothing is written.
COMMIT = """
local prefix, at = KEYS[1], 3
for _ = 1, tonumber(ARGV[2]) do
  local name, key, found = ARGV[at], ARGV[at + 1]
  if name == 'lease' then found = redis.call('GET', prefix .. 'lease:' .. key)
  else found = redis.call('HGET', prefix .. name, key) end
  if (found and redis.sha1hex(found) or '') ~= ARGV[at + 2] then return 0 end
  at = at + 3
end
while at <= #ARGV do
  local what, name, key = ARGV[at], prefix .. ARGV[at + 1], ARGV[at + 2]
  if what == 'release' then redis.call('DEL', name .. ':' .. key)
  elseif what == 'delete' then
    redis.call('ZREM', name .. ':keys', key)
    redis.call('HDEL', name, key)
  else
    redis.call('ZADD', name .. ':keys', 0, key)
    if what == 'put' then redis.call('HSET', name, key, ARGV[at + 3]) end
  end
  at = at + 4
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', 86400)
redis.call('INCR', prefix .. 'version')
return 1
"""


class SharedView:
    """A `View`. ask: sends a pipeline to the server. names: what its keys are called there. numbers: for new sessions,
    which this server has to itself. floor: see `View`.

    Records read by their keys are compared at the end; those found by a scan are not. That is enough: whatever changes
    a session changes its head, which is read by its key.
    """

    def __init__(self, ask: Ask, names: Names, numbers: list[int] | None = None, floor: int = 0) -> None:
        self._ask, self._names, self.floor = ask, names, floor
        self._numbers, self._has_taken = [] if numbers is None else numbers, False
        self._num_asked = 0
        self._read: dict[tuple[str, bytes], bytes | None] = {}
        self._written: defaultdict[str, dict[bytes, bytes | None]] = defaultdict(dict)
        self._released: list[bytes] = []

    # -- reading -----------------------------------------------------------------------------------------------------
    def get(self, table: str, key: bytes) -> bytes | None:
        if key in self._written[table]:
            return self._written[table][key]
        self.expect([(table, key)])
        return self._read[table, key]

    def expect(self, places: Sequence[Place]) -> None:
        unknown = [place for place in places if place not in self._read]
        num_values = sum(table not in KEYS_ONLY for table, _ in unknown)
        for some in _batches(unknown, KEYS_AT_ONCE if num_values <= VALUES_AT_ONCE else VALUES_AT_ONCE):
            self._read |= zip(some, self._fetched(some), strict=True)

    def new_session(self, take: Callable[[int], int]) -> int:
        """See `View`. After a failover to a Redis whose clock is behind another server may have been given the same."""
        while True:
            if not self._numbers:
                first, self._has_taken = take(NUMBERS_AT_ONCE), True
                self._numbers += range(first, first + NUMBERS_AT_ONCE)
            number = self._numbers.pop(0)
            if self.get(HEADS, be64(number)) is None:  # which is compared at the end
                return number

    def give_back(self) -> None:
        """It is not committed: the numbers that it has taken may be given to others."""
        if self._has_taken:
            self._numbers.clear()

    def note(self, table: str, key: bytes, value: bytes | None) -> None:
        """What `ask` has read beside what it was asked for."""
        self._read[table, key] = value

    def lease_of(self, key: SessionKey) -> bytes | None:
        """The token of the server that may write to this session."""
        return self.get(LEASES, name_key(key))

    def count(self, table: str) -> int:
        (reply,) = self._asked(("ZCARD", self._names.keys(table)))
        return int(reply)  # type: ignore[arg-type]

    def num_bytes(self) -> int:
        places = [self._names.values(table) for table in TABLES if table not in KEYS_ONLY]
        places += [self._names.keys(table) for table in TABLES]
        return sum(size or 0 for size in self._asked(*(("MEMORY", "USAGE", place) for place in places)))  # type: ignore[misc]

    def scan(
        self, table: str, prefix: bytes = b"", reverse: bool = False, before: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        stored = self._stored(table, prefix, reverse, before)
        own = [
            (key, value) for key, value in sorted(self._written[table].items(), reverse=reverse)
            if key.startswith(prefix) and (before is None or key < before)
        ]  # fmt: skip
        both = merge(own, stored, key=itemgetter(0), reverse=reverse)  # of equals the own one first
        for key, entries in groupby(both, key=itemgetter(0)):
            value = next(entries)[1]
            if value is not None:
                yield key, value

    def keys_below(self, table: str, prefixes: Sequence[bytes], limit: int) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        for some in _batches(prefixes, KEYS_AT_ONCE):
            name = self._names.keys(table)
            most = limit + MAX_OWN
            asked = [("ZRANGEBYLEX", name, b"[" + one, b"[" + one + ALL_ONES, "LIMIT", 0, most) for one in some]
            found += [_bytes_of(reply) for reply in self._asked(*asked)]
        own = self._written[table]
        added = sorted(key for key, value in own.items() if value is not None)
        for prefix, keys in zip(prefixes, found, strict=True):
            first = bisect_left(added, prefix)
            mine = takewhile(lambda key: key.startswith(prefix), islice(added, first, first + limit))  # noqa: B023
            kept = {*mine, *(key for key in keys if own.get(key, b"") is not None)}
            keys[:] = sorted(kept)[:limit]
        return found

    def _stored(self, table: str, prefix: bytes, reverse: bool, before: bytes | None) -> Iterator[Entry]:
        low, high = b"[" + prefix, b"[" + prefix + ALL_ONES if before is None else b"(" + before
        verb = "ZREVRANGEBYLEX" if reverse else "ZRANGEBYLEX"
        while True:
            bounds = (high, low) if reverse else (low, high)
            (reply,) = self._asked((verb, self._names.keys(table), *bounds, "LIMIT", 0, KEYS_AT_ONCE))
            keys = _bytes_of(reply)
            for some in _batches(keys, VALUES_AT_ONCE):
                yield from zip(some, self._values(table, some), strict=True)
            if len(keys) < KEYS_AT_ONCE:
                return
            low, high = (low, b"(" + keys[-1]) if reverse else (b"(" + keys[-1], high)

    def _values(self, table: str, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The values of these keys; None for those deleted since."""
        if table in KEYS_ONLY:
            return [b""] * len(keys)
        (reply,) = self._asked(("HMGET", self._names.values(table), *keys))
        assert isinstance(reply, list)
        return [value if isinstance(value, bytes) else None for value in reply]

    def _fetched(self, places: Sequence[Place]) -> list[bytes | None]:
        commands: list[Command] = []
        for table, key in places:
            if table == LEASES:
                commands.append(("GET", self._names.leased(key)))
            elif table in KEYS_ONLY:
                commands.append(("ZSCORE", self._names.keys(table), key))
            else:
                commands.append(("HGET", self._names.values(table), key))
        replies = self._asked(*commands) if commands else []
        return [
            None if reply is None else b"" if table in KEYS_ONLY else bytes(reply)  # type: ignore[arg-type]
            for (table, _), reply in zip(places, replies, strict=True)
        ]

    def _asked(self, *commands: Command) -> list[Reply]:
        self._num_asked += 1
        return self._ask(*commands)

    def is_still_so(self) -> bool:
        """Whether nothing that was read has changed since."""
        if self._num_asked <= 1:
            return True
        places = [place for place in self._read if place[0] not in KEYS_ONLY]
        return all(
            self._fetched(some) == [self._read[place] for place in some] for some in _batches(places, VALUES_AT_ONCE)
        )

    # -- writing -----------------------------------------------------------------------------------------------------
    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._written[table][key] = value

    def delete(self, table: str, key: bytes) -> None:
        self._written[table][key] = None

    def end_lease(self, key: SessionKey) -> None:
        """Take the lease away: the turn that a server is computing will not be stored."""
        self._released.append(name_key(key))

    @property
    def has_changes(self) -> bool:
        return any(self._written.values()) or bool(self._released)

    def script_arguments(self, number: bytes) -> list[Arg]:
        """Of COMMIT, for the commit of this number."""
        compared = [(table, key, value) for (table, key), value in self._read.items() if table not in KEYS_ONLY]
        arguments: list[Arg] = [number, len(compared)]
        for table, key, value in compared:
            arguments += (table, key, "" if value is None else hashlib.sha1(value, usedforsecurity=False).hexdigest())
        for key in self._released:
            arguments += ("release", LEASES, key, "")
        for table, entries in self._written.items():
            for key, value in entries.items():
                what = "delete" if value is None else "add" if table in KEYS_ONLY else "put"
                arguments += (what, table, key, value or "")
        return arguments


def _batches(items: Sequence[bytes] | Sequence[Place], size: int) -> Iterator[list]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _bytes_of(reply: Reply) -> list[bytes]:
    if not isinstance(reply, list) or not all(isinstance(one, bytes) for one in reply):
        raise RemoteError(f"an answer is no list of keys: {reply!r:.80}")
    return reply  # type: ignore[return-value]
