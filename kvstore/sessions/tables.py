"""The tables of sessions, and what one transaction does with them: create, append, delete and list.

Knows no file and no thread: a `View` is a transaction on sorted tables. A function checks everything before it writes,
so one that raises has changed nothing, and the transaction can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from typing import Any, Protocol

from msgspec.structs import replace

from kvstore.blocks.ids import BLOCK_ID_BYTES, BlockId
from kvstore.disk.records import label, pack, seal
from kvstore.errors import RequestError, SessionNotFoundError, StoreError
from kvstore.sessions.record import (
    Message,
    SessionHead,
    SessionKey,
    SessionState,
    Tombstone,
    TurnRecord,
    damaged,
    digest,
    encode,
    micros,
    replay,
    unseal,
    with_turn,
)

# Numbers in keys are big-endian, so that they sort. Tables marked * hold keys only, which `check` compares with heads.
NAMES = "names"  # digest of the tenant, session id -> number of the session
HEADS = "heads"  # session number -> SessionHead
TURNS = "turns"  # session number, turn number -> TurnRecord
REQUESTS = "requests"  # session number, digest of an idempotency key -> turn number
ORDER = "order"  # * digest of the tenant, updated, session number
EXPIRY = "expiry"  # * expires, session number
REFS = "refs"  # * block id, session number
TOMBSTONES = "tombstones"  # deletion number -> Tombstone
ASIDE = "aside"  # session number, index -> what a repair by version 0.1 set aside: it goes with the session, unread
COUNTERS = "counters"  # "session", "deletion" -> the next number; "name" -> the name of this file
TABLES = (NAMES, HEADS, TURNS, REQUESTS, ORDER, EXPIRY, REFS, TOMBSTONES, COUNTERS, ASIDE)
KEYS_ONLY = frozenset({ORDER, EXPIRY, REFS})
SESSION, DELETION = "session", "deletion"  # what is counted


Place = tuple[str, bytes]  # a table, and a key in it


class StaleViewError(Exception):
    """Another process has changed what this transaction read. Nothing was written; run it again."""


class View(Protocol):
    """A transaction on the tables. A scan ends before the next write."""

    floor: int = 0  # of new numbers. It grows with time where a failover may lose the latest: none is given again

    def get(self, table: str, key: bytes) -> bytes | None: ...

    def put(self, table: str, key: bytes, value: bytes) -> None: ...

    def delete(self, table: str, key: bytes) -> None: ...

    def count(self, table: str) -> int: ...

    def num_bytes(self) -> int:
        """What all tables take, without what was deleted."""

    def scan(
        self, table: str, prefix: bytes = b"", reverse: bool = False, before: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Entries whose keys start with the prefix, in order. reverse: from the last one down, or from the last before
        `before`.
        """

    def keys_below(self, table: str, prefixes: Sequence[bytes], limit: int) -> list[list[bytes]]:
        """For each prefix, the first keys that start with it."""
        return [[key for key, _ in islice(self.scan(table, prefix), limit)] for prefix in prefixes]

    def expect(self, places: Sequence[Place]) -> None:
        """Say what `get` will ask for, so that remote tables can fetch it together."""
        return

    def new_session(self, take: Callable[[int], int]) -> int:
        """A number that no session has. take: gives the first of so many new ones."""
        return take(1)


def be64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def name_key(key: SessionKey) -> bytes:
    return digest(key.tenant) + key.session_id.encode()


def turn_key(number: int, turn: int) -> bytes:
    return be64(number) + turn.to_bytes(4, "big")


def request_key(number: int, idempotency_key: str) -> bytes:
    return be64(number) + digest(idempotency_key)


def order_key(head: SessionHead) -> bytes:
    return digest(head.key.tenant) + be64(micros(head.updated_s)) + be64(head.number)


def expiry_key(head: SessionHead) -> bytes | None:
    return None if head.expires_s is None else be64(micros(head.expires_s)) + be64(head.number)


def number_of(view: View, key: SessionKey) -> int | None:
    """The session's number."""
    value = view.get(NAMES, name_key(key))
    return None if value is None else unseal(int, NAMES, name_key(key), value, f"session {key.session_id}")


def read_head(view: View, key: SessionKey) -> SessionHead | None:
    number = number_of(view, key)
    if number is None:
        return None
    head = head_of(view, number, f"session {key.session_id}")
    if head.key != key:
        raise damaged(f"session {key.session_id}", "its head is another session's")
    return head


def head_of(view: View, number: int, what: str) -> SessionHead:
    value = view.get(HEADS, be64(number))
    head = None if value is None else unseal(SessionHead, HEADS, be64(number), value, what)
    if head is None or head.number != number:
        raise damaged(what, "its head is missing")
    return head


def is_there(view: View, number: int) -> bool:
    """Whether any record of this session is stored."""
    return view.get(HEADS, be64(number)) is not None or any(True for _ in view.scan(TURNS, be64(number)))


def read_turns(view: View, head: SessionHead, last: int) -> list[TurnRecord]:
    """Turns 1 to `last`."""
    what = f"session {head.key.session_id}"
    turns: list[TurnRecord] = []
    for key, value in view.scan(TURNS, be64(head.number)):
        if len(turns) == last:
            break
        turns.append(unseal(TurnRecord, TURNS, key, value, what))
        if key != turn_key(head.number, len(turns)) or turns[-1].number != len(turns):
            raise damaged(what, f"turn {len(turns)} is missing")
    if len(turns) != last:
        raise damaged(what, f"turn {len(turns) + 1} is missing")
    return turns


def load(view: View, key: SessionKey, turn: int | None = None) -> SessionState | None:
    head = read_head(view, key)
    if head is None or (turn is not None and not 0 <= turn <= head.num_turns):
        return None
    last = head.num_turns if turn is None else turn
    state = replay(head, read_turns(view, head, last))
    if last == head.num_turns and len(state.token_ids) != head.num_tokens:
        raise damaged(f"session {key.session_id}", f"{len(state.token_ids)} tokens where {head.num_tokens} were stored")
    return state


def read_page(view: View, key: SessionKey, after: int, limit: int) -> list[TurnRecord] | None:
    """At most so many turns after turn `after`; None if there is no such session."""
    head = read_head(view, key)
    if head is None:
        return None
    numbers = range(after + 1, min(after + limit, head.num_turns) + 1)
    view.expect([(TURNS, turn_key(head.number, number)) for number in numbers])
    return [_turn_at(view, head, number) for number in numbers]


def _turn_at(view: View, head: SessionHead, number: int) -> TurnRecord:
    what, place = f"session {head.key.session_id}", turn_key(head.number, number)
    value = view.get(TURNS, place)
    turn = None if value is None else unseal(TurnRecord, TURNS, place, value, what)
    if turn is None or turn.number != number:
        raise damaged(what, f"turn {number} is missing")
    return turn


def read_turn(view: View, key: SessionKey, number: int) -> TurnRecord | None:
    found = read_page(view, key, number - 1, 1) if number > 0 else None
    return found[0] if found else None


def turn_of_request(view: View, key: SessionKey, idempotency_key: str) -> TurnRecord | None:
    number = number_of(view, key)
    place = b"" if number is None else request_key(number, idempotency_key)
    value = view.get(REQUESTS, place) if place else None
    if value is None:
        return None
    what = f"session {key.session_id}"
    turn = read_turn(view, key, unseal(int, REQUESTS, place, value, what))
    if turn is None or turn.idempotency_key != idempotency_key:
        raise damaged(what, "an idempotency key names a turn that has another")
    return turn


def last_number(view: View, counter: str) -> int:
    """The last number given out; 0 if there was none yet."""
    value = view.get(COUNTERS, counter.encode())
    return 0 if value is None else unseal(int, COUNTERS, counter.encode(), value, f"the counter of {counter}s") - 1


def next_number(view: View, counter: str, table: str, count: int = 1) -> int:
    """The first of so many numbers that were never used: a turn computed for a deleted session must not end up in a new
    one of that id.
    """
    key = counter.encode()
    try:
        number = max(last_number(view, counter) + 1, view.floor)
    except StoreError:
        # One damaged record must not refuse every new session: take a number far beyond all recent ones.
        last = next(view.scan(table, reverse=True), (b"", b""))[0]
        number = int.from_bytes(last, "big") + 2**32
    view.put(COUNTERS, key, seal(COUNTERS, key, pack(number + count)))
    return number


def file_name(view: View) -> bytes | None:
    """The file's name, see `marker`. None if it has none yet; empty if it is damaged."""
    value = view.get(COUNTERS, b"name")
    with suppress(StoreError):
        return None if value is None else unseal(bytes, COUNTERS, b"name", value, "the file's name")
    return b""


def set_file_name(view: View, name: bytes) -> None:
    view.put(COUNTERS, b"name", seal(COUNTERS, b"name", pack(name)))


def _put_head(view: View, head: SessionHead, before: SessionHead | None = None) -> None:
    value = seal(HEADS, be64(head.number), encode(head, f"session {head.key.session_id}"))
    if before is not None:
        _delete_places(view, before)
    view.put(HEADS, be64(head.number), value)
    view.put(ORDER, order_key(head), b"")
    if (expiry := expiry_key(head)) is not None:
        view.put(EXPIRY, expiry, b"")


def _delete_places(view: View, head: SessionHead) -> None:
    view.delete(ORDER, order_key(head))
    if (expiry := expiry_key(head)) is not None:
        view.delete(EXPIRY, expiry)


def entries_of(head: SessionHead, turns: Sequence[TurnRecord]) -> dict[Place, bytes]:
    """What must be stored beside the head and all its turns, to find them."""
    number, name, expiry = head.number, name_key(head.key), expiry_key(head)
    entries = {(NAMES, name): seal(NAMES, name, pack(number)), (ORDER, order_key(head)): b""}
    if expiry is not None:
        entries[EXPIRY, expiry] = b""
    for turn in turns:
        entries |= entries_of_turn(number, turn)
    return entries


def entries_of_turn(number: int, turn: TurnRecord) -> dict[Place, bytes]:
    """number: of its session."""
    entries = {(REFS, block_id + be64(number)): b"" for block_id in turn.block_ids}
    if turn.idempotency_key is not None:
        place = request_key(number, turn.idempotency_key)
        entries[REQUESTS, place] = seal(REQUESTS, place, pack(turn.number))
    return entries


def put_turn(view: View, number: int, turn: TurnRecord, payload: bytes) -> None:
    key = turn_key(number, turn.number)
    view.put(TURNS, key, seal(TURNS, key, payload))
    entries = entries_of_turn(number, turn)
    view.expect(list(entries))
    for (table, place), value in entries.items():
        # A rebase lists most blocks again; writing them again would copy a page each for nothing.
        if view.get(table, place) != value:
            view.put(table, place, value)


def encode_turn(turn: TurnRecord, key: SessionKey) -> bytes:
    """For `append` and `put_turn`. Raises StoreError."""
    return encode(turn, f"turn {turn.number} of session {key.session_id}")


def next_of(view: View, draft: SessionHead, turns: Sequence[TurnRecord], expected: int | None) -> SessionHead | None:
    """The head of the session whose next turns these are; None: of a new one. expected: the number of the session that
    they were computed for, which may have expired since. Raises StoreError.
    """
    head, name = read_head(view, draft.key), f"session {draft.key.session_id}"
    if expected is not None and (head is None or head.number != expected):
        raise StoreError(f"{name} was deleted meanwhile: turn {turns[0].number} is not stored")
    if expected is None and head is not None and head.is_over(draft.updated_s):
        head = None
    num_turns = head.num_turns if head else 0
    for number, turn in enumerate(turns, num_turns + 1):
        if turn.number != number:
            raise StoreError(
                f"{name} has {num_turns} turns, so turn {turn.number} is not its next one: another writer came first; "
                "load the session again"
            )
    return head


def append(
    view: View, draft: SessionHead, turns: Sequence[TurnRecord], payloads: Sequence[bytes],
    expected: int | None = None, begun: SessionHead | None = None, **changes: Any,
) -> SessionHead:  # fmt: skip
    """Append turns; a session that has expired makes room for a new one.

    draft: the head if the session is new, unless `begun` is that; its time, fingerprint and model apply in any case.
    expected: see `next_of`. changes: see `change_head`.
    """
    if expected is not None:
        entries = [place for turn in turns for place in entries_of_turn(expected, turn)]
        view.expect([(NAMES, name_key(draft.key)), (HEADS, be64(expected)), *entries])
    head, name = next_of(view, draft, turns, expected), f"session {draft.key.session_id}"
    after = head or begun or draft
    after = replace(after, fingerprint=draft.fingerprint or after.fingerprint, model=draft.model or after.model)
    for turn in turns:
        if turn.system and (turn.number > 1 or (after.system and turn.system != after.system)):
            raise StoreError(f"turn {turn.number} of {name} brings another system prompt: make a new one")
        place = None if head is None or turn.idempotency_key is None else request_key(head.number, turn.idempotency_key)
        if place is not None and view.get(REQUESTS, place) is not None:
            raise StoreError(f"{name} has a turn for this idempotency key: answer with that one")
        after = with_turn(after, turn, draft.updated_s)
    after = replace(after, **changes)
    encode(after, name)  # raises here, when nothing is written yet
    if head is None:
        delete(view, draft.key)
        number = view.new_session(partial(next_number, view, SESSION, HEADS))
        after, named = replace(after, number=number), name_key(draft.key)
        view.put(NAMES, named, seal(NAMES, named, pack(after.number)))
        view.expect([place for turn in turns for place in entries_of_turn(after.number, turn)])
    for turn, payload in zip(turns, payloads, strict=True):
        put_turn(view, after.number, turn, payload)
    _put_head(view, after, before=head)
    return after


def change_head(view: View, key: SessionKey, now_s: float, **changes: Any) -> SessionHead:
    """changes: fields of the head that no turn says: ttl_s, title, is_personal."""
    head = read_head(view, key)
    if head is None or head.is_over(now_s):
        raise SessionNotFoundError(f"there is no session {key.session_id!r}", param="session_id")
    after = replace(head, **changes)
    encode(after, f"session {key.session_id}")
    _put_head(view, after, before=head)
    return after


def unshared(view: View, block_ids: set[BlockId], number: int) -> set[BlockId]:
    """Those of the blocks that no session but this one refers to."""
    blocks, mine = sorted(block_ids), be64(number)
    found = view.keys_below(REFS, blocks, 2)  # one may be its own
    return {b for b, places in zip(blocks, found, strict=True) if all(place == b + mine for place in places)}


def unshared_blocks_of(view: View, key: SessionKey) -> set[BlockId]:
    number = number_of(view, key)
    return set() if number is None else unshared(view, _known_blocks(view, number), number)


def delete(view: View, key: SessionKey, if_over_s: float | None = None) -> Tombstone | None:
    """Delete a session, also a damaged one: a person's right to deletion does not depend on the disk's health.

    if_over_s: only if it has expired by this time.
    """
    number = number_of(view, key)
    if number is None:
        return None
    if if_over_s is not None and ((head := read_head(view, key)) is None or not head.is_over(if_over_s)):
        return None
    deletion = next_number(view, DELETION, TOMBSTONES)
    block_ids = remove(view, key, number)
    tombstone = Tombstone(deletion, key, tuple(sorted(unshared(view, block_ids, number))))
    put_tombstone(view, tombstone)
    return tombstone


def put_tombstone(view: View, tombstone: Tombstone) -> None:
    place = be64(tombstone.number)
    packed = encode(tombstone, f"the deletion of session {tombstone.key.session_id}")
    view.put(TOMBSTONES, place, seal(TOMBSTONES, place, packed))


def remove(view: View, key: SessionKey, number: int) -> set[BlockId]:
    """Remove all records of a session. Returns its blocks."""
    block_ids = _known_blocks(view, number)
    try:
        _delete_places(view, head_of(view, number, "session"))
    except StoreError:
        for table, prefix in ((ORDER, digest(key.tenant)), (EXPIRY, b"")):
            for place in [place for place, _ in view.scan(table, prefix) if place.endswith(be64(number))]:
                view.delete(table, place)
    view.delete(NAMES, name_key(key))
    view.delete(HEADS, be64(number))
    for table in (TURNS, REQUESTS, ASIDE):
        for place in [place for place, _ in view.scan(table, be64(number))]:
            view.delete(table, place)
    for block_id in block_ids:
        view.delete(REFS, block_id + be64(number))
    return block_ids


def _known_blocks(view: View, number: int) -> set[BlockId]:
    """The session's blocks: from its turns, or, if those cannot be read, from all references."""
    try:
        head = head_of(view, number, "session")
        return {block_id for turn in read_turns(view, head, head.num_turns) for block_id in turn.block_ids}
    except StoreError:
        mine = (place for place, _ in view.scan(REFS) if place[BLOCK_ID_BYTES:] == be64(number))
        return {place[:BLOCK_ID_BYTES] for place in mine}


def pending_deletions(view: View, after: int = 0) -> list[Tombstone]:
    """Deletions behind number `after` that are not finished, in order. A damaged one is left out and reported by
    `check`; its text is gone, and its blocks age out.
    """
    tombstones: list[Tombstone] = []
    for place, value in takewhile(lambda entry: entry[0] > be64(after), view.scan(TOMBSTONES, reverse=True)):
        with suppress(StoreError):
            tombstones.append(tombstone(place, value))
    return tombstones[::-1]


def tombstone(place: bytes, value: bytes) -> Tombstone:
    return unseal(Tombstone, TOMBSTONES, place, value, f"deletion {int.from_bytes(place, 'big')}")


def list_heads(
    view: View, tenant: str, limit: int, after: str | None, is_personal: bool | None, now_s: float
) -> tuple[list[SessionHead], set[int]]:
    """Heads, the most recently updated first, and the numbers of those left out because they are damaged.

    is_personal: only heads that say so; None: all. now_s: sessions that have expired by then are left out, too.
    """
    before = None
    if after is not None:
        try:
            before = digest(tenant) + bytes.fromhex(after)
        except ValueError:
            before = b""
        if len(before) != 48:
            raise RequestError("after is not a cursor of this list: pass the last session's, as it was given", "after")
    heads: list[SessionHead] = []
    are_damaged: set[int] = set()
    for place in _expecting_heads(view, view.scan(ORDER, digest(tenant), reverse=True, before=before), limit):
        if len(heads) >= limit:
            break
        try:
            head = head_of(view, int.from_bytes(place[-8:], "big"), "session")
            if order_key(head) != place:
                raise damaged("session", "it is listed at another place")
            if is_personal in (None, head.is_personal) and not head.is_over(now_s):
                heads.append(head)
        except StoreError:
            are_damaged.add(int.from_bytes(place[-8:], "big"))
    return heads, are_damaged


def _expecting_heads(view: View, entries: Iterator[tuple[bytes, bytes]], size: int) -> Iterator[bytes]:
    """The keys of these entries, which end with session numbers; the heads of so many are fetched together."""
    while places := [place for place, _ in islice(entries, max(1, size))]:
        view.expect([(HEADS, place[-8:]) for place in places])
        yield from places


def expired(view: View, now_s: float, limit: int) -> list[SessionKey]:
    """Expired sessions, the longest expired first. A damaged session never expires; `check` reports it."""
    keys: list[SessionKey] = []
    due = takewhile(lambda entry: entry[0][:8] <= be64(micros(now_s)), view.scan(EXPIRY))
    for place in _expecting_heads(view, due, limit):
        if len(keys) >= limit:
            break
        try:
            head = head_of(view, int.from_bytes(place[8:], "big"), "session")
        except StoreError:
            continue
        if expiry_key(head) == place:
            keys.append(head.key)
    return keys


def draft_head(
    key: SessionKey, now_s: float, system: Sequence[Message] = (), fingerprint: bytes = b"", model: str = ""
) -> SessionHead:
    """A head whose number is not given yet."""
    return SessionHead(key, 0, now_s, now_s, system=tuple(system), fingerprint=fingerprint, model=label(model))
