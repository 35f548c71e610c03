"""A process to be killed or to crash in the place of the tests: it commits turns and logs each acknowledged one, or
reads a file in which bits were flipped. And what the tests share: turns, all of whose values are derived from the
session's id and the turn's number, and what they add up to.
"""

import hashlib
import os
import sys
import threading
from pathlib import Path

from msgspec.structs import replace

from kvstore.disk.env import StoreEnvironment, open_environment
from kvstore.errors import StoreError
from kvstore.sessions import tables
from kvstore.sessions.record import SessionKey, SessionState, TurnRecord
from kvstore.sessions.store import MAP_BYTES, SessionStore

SESSIONS = ("red", "green", "blue")
TENANT = "tenant"


def block_id(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def make_turn(session_id: str, number: int, **changes) -> TurnRecord:
    """A turn that no other session or number has; every fifth rebases."""
    rebase = number % 5 == 0
    seed = int.from_bytes(block_id(f"{session_id}/{number}")[:3], "little")
    values = {
        "number": number,
        "messages": [
            {"role": "user", "content": f"question {number} of {session_id} " + "?" * (seed % 700)},
            {"role": "assistant", "content": f"answer {number} of {session_id}"},
        ],
        "token_ids": range(seed, seed + 20 + seed % 50),
        "chain": [block_id(f"{session_id}/{number}/{i}") for i in range(1 + seed % 4)],
        "base": "rebase" if rebase else "append",
        "first_reencoded": seed % 4 if rebase else None,
        "num_dropped_messages": 2 * (number // 5),
        "truncated_tokens": 7 if rebase else 0,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": seed, "completion_tokens": 3},
        "created_s": 1000.0 + number,
        "idempotency_key": f"request {number}",
    }
    return TurnRecord(**(values | changes))


class Clock:
    """Each look is a second later."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def open_file(directory: Path) -> StoreEnvironment:
    directory.parent.mkdir(parents=True, exist_ok=True)
    return open_environment(directory, MAP_BYTES, max_dbs=16, metasync=True)


def disk_store(path: Path, clock=None) -> SessionStore:
    return SessionStore(lambda: open_file(path / "sessions"), clock or Clock())


def create(store: SessionStore, key: SessionKey, *about, ttl_s=None):
    """A session without turns, as only the store itself makes one. about: system prompt, fingerprint and model."""

    def work(view):
        return tables.append(view, replace(tables.draft_head(key, store.clock(), *about), ttl_s=ttl_s), (), ())

    return store._submit(key, work)


def talk(store: SessionStore, key: SessionKey, num_turns: int, **changes) -> list[TurnRecord]:
    """Turns after those there are; all of them are returned."""
    head = store.head(key)
    first = head.num_turns + 1 if head else 1
    for number in range(first, num_turns + 1):
        store.commit_turn(key, make_turn(key.session_id, number, **changes)).wait()
    return [make_turn(key.session_id, number, **changes) for number in range(1, num_turns + 1)]


def expected(turns: list[TurnRecord], system=()) -> tuple:
    """The plain loop over turns: messages, token ids, chain, truncation."""
    messages, token_ids, chain = list(system), [], []
    for turn in turns:
        messages += turn.messages
        token_ids = [*([] if turn.base == "rebase" else token_ids), *turn.token_ids]
        chain = [*([] if turn.base == "rebase" else chain), *turn.chain]
    last = (turns[-1].first_reencoded, turns[-1].num_dropped_messages) if turns else (None, 0)
    return messages, token_ids, chain, *last, sum(turn.truncated_tokens for turn in turns)


def content(state: SessionState | None) -> tuple:
    assert state is not None
    return (
        state.messages, state.token_ids, state.chain, state.first_reencoded, state.num_dropped_messages,
        state.truncated_tokens,
    )  # fmt: skip


def commit_until_killed(directory: str, log: str) -> None:
    """A thread per session, so that groups form; a line of the log is synced after the turn is acknowledged."""
    store = SessionStore(lambda: open_file(Path(directory)))
    number = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def talk(session_id: str) -> None:
        key = SessionKey(TENANT, session_id)
        head = store.head(key)
        turn = head.num_turns if head else 0
        while True:
            turn += 1
            store.commit_turn(key, make_turn(session_id, turn)).wait()
            os.write(number, f"{session_id} {turn}\n".encode())
            os.fsync(number)

    for session_id in SESSIONS:
        threading.Thread(target=talk, args=(session_id,)).start()


def read_flipped(directory: str, expected: int) -> None:
    """Prints what became of each session; leaves with 3 when anything comes back that was never stored."""
    store = SessionStore(lambda: open_file(Path(directory)))
    for session_id in SESSIONS:
        try:
            state = store.load(SessionKey(TENANT, session_id))
        except StoreError as error:
            print(session_id, "reported", error)
            continue
        if state is None:
            print(session_id, "missing")
        elif [dict(m) for n in range(1, expected + 1) for m in make_turn(session_id, n).messages] != state.messages:
            sys.exit(3)
        else:
            print(session_id, "whole")
    try:
        print(len(store.check().problems), "problems", store.list(TENANT) and "")
        print(
            store.expired(1e9),
            store.pending_deletions(),
            store.delete(SessionKey(TENANT, "red")).wait(20) and "",
        )
    except StoreError as error:
        print("reported", type(error).__name__)
    store.close()


if __name__ == "__main__":
    if sys.argv[1] == "commit":
        commit_until_killed(sys.argv[2], sys.argv[3])
    else:
        read_flipped(sys.argv[2], int(Path(sys.argv[3]).read_text()))
