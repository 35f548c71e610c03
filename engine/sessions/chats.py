"""Opens sessions by their ids, so that all callers share one object per session; passes on hints that one is needed
soon.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvstore.engine.client.messages import Prefetch
from kvstore.engine.client.requests import CoreClient
from kvstore.engine.sessions.chat import ChatSession, Means
from kvstore.engine.sessions.claims import Claims
from kvstore.engine.sessions.stored import lineage_of
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.prompts import check_length, check_owner, check_text
from kvstore.errors import RequestError, SessionNotFoundError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import SessionStore


@dataclass(frozen=True, slots=True)
class Language:
    """Encodes texts. template: None if there is none that works; why_no_chat is the reason."""

    tokenizer: Any
    template: ChatTemplate | None
    why_no_chat: str

    def chat_template(self) -> ChatTemplate:
        """Raises RequestError."""
        if self.template is None:
            raise RequestError(self.why_no_chat, param="messages")
        return self.template


MAX_KEPT = 256
MAX_KEPT_TOKENS = 2_000_000  # about 40 bytes each


class Chats:
    """The sessions of one engine. claims: which turn has which. known: the objects in use. lock: held while one is
    made.
    """

    def __init__(self, client: CoreClient, language: Language, sessions: SessionStore) -> None:
        self.client = client
        self.language = language
        self.sessions = sessions
        self.claims = Claims(sessions.sharing)
        self.known: weakref.WeakValueDictionary[SessionKey, ChatSession] = weakref.WeakValueDictionary()
        self.lock = threading.RLock()
        self._kept: OrderedDict[SessionKey, tuple[ChatSession, int]] = OrderedDict()  # with its tokens then
        self._num_kept_tokens = 0

    def check(self, key: SessionKey, system: str | None) -> None:
        """Check the arguments for a session. Raises RequestError, and as `CoreClient.check_open`."""
        check_owner(key.tenant, "", 0)
        if system is not None:
            check_text(system, "system")
        self.language.chat_template()
        if system is not None:
            check_length([system], self.language.tokenizer, self.client.facts.max_request_tokens)
        self.client.check_open()

    def open(
        self,
        key: SessionKey,
        system: str | None = None,
        truncation: str | None = None,
        truncation_reuse: str | None = None,
        is_new: bool = False,
    ) -> ChatSession:
        """See `Engine.chat`; its arguments are already checked."""
        is_known = is_new or self.get(key) is not None
        state = None if is_known else self.sessions.load(key)  # outside the lock: it reads the disk
        with self.lock:
            self.client.check_open()
            chat = self.get(key)
            if chat is None:
                if not is_new and self.sessions.head(key) != (None if state is None else state.head):
                    state = self.sessions.load(key)  # it may have changed since
                chat = self.known[key] = ChatSession(self._means(), key, system, state)
            chat.set_truncation(truncation, truncation_reuse)
            return chat

    def get(self, key: SessionKey) -> ChatSession | None:
        """The object in use. None if there is none, if the core has restarted since, or if the session was deleted."""
        chat = self.known.get(key)
        return chat if chat is not None and chat.life == self.client.life and not chat.stored.is_deleted else None

    def keep(self, chat: ChatSession) -> None:
        """Keep the object in memory for its next turn, as one of those used last."""
        num_tokens = len(chat.token_ids)
        with self.lock:
            self._let_go(chat.key)
            self._kept[chat.key] = (chat, num_tokens)
            self._num_kept_tokens += num_tokens
            while len(self._kept) > MAX_KEPT or (self._num_kept_tokens > MAX_KEPT_TOKENS and len(self._kept) > 1):
                self._let_go(next(iter(self._kept)))

    def _let_go(self, key: SessionKey) -> None:
        _, num_tokens = self._kept.pop(key, (None, 0))
        self._num_kept_tokens -= num_tokens

    def drop(self, key: SessionKey) -> None:
        """Forget the object: the next `open` makes a new one."""
        with self.lock:
            self.known.pop(key, None)
            self._let_go(key)

    def _means(self) -> Means:
        language = self.language
        template = language.chat_template()
        return Means(self.client, language.tokenizer, template, self.sessions, self.claims, self._reopened)

    def _reopened(self, key: SessionKey, truncation: str, truncation_reuse: str) -> ChatSession:
        self.drop(key)
        return self.open(key, None, truncation, truncation_reuse)

    def prefetch(self, session_id: str, tenant: str) -> None:
        """See `Engine.prefetch`."""
        self.client.check_open()
        key = SessionKey(tenant, session_id)
        state = self.sessions.load(key)
        if state is None and key in self.known:
            return  # it has no turn yet
        if state is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        if state.head.fingerprint != self.client.facts.fingerprint:
            return  # its KV is of another model
        lineage = lineage_of(state, self.client.facts.root(tenant))
        self.client.call(Prefetch(state.chain, state.token_ids, lineage, tenant))
