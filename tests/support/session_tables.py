"""The tables below a store of sessions or answers, to be damaged by tests."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.sessions.answers import AnswerStore
from kvstore.sessions.store import SessionStore
from kvstore.sessions.tables import View


@contextmanager
def tables_of(store: SessionStore | AnswerStore) -> Iterator[View]:
    """What is changed in here is committed as the store's own changes are."""
    with store.transactions.storage.write() as view:
        yield view
