"""Sessions by their ids: opened, while somebody holds one the same object, and hinted at."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

from kvstore.engine.sessions.chat import ChatSession, Means, lineage_of
from kvstore.engine.sessions.core import Core
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.prompts import check_length, check_owner, check_text
from kvstore.errors import RequestError, SessionNotFoundError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import SessionStore


@dataclass(frozen=True, slots=True)
class Language:
    """What makes ids of texts. template: None where it has none, or there is no tokenizer; why_no_chat says so."""

    tokenizer: Any
    template: ChatTemplate | None
    why_no_chat: str

    def chat_template(self) -> ChatTemplate:
        """Raises RequestError."""
        if self.template is None:
            raise RequestError(self.why_no_chat, param="messages")
        return self.template


class Chats:
    """The sessions of one engine. known: objects that somebody holds; lock: held to make one."""

    def __init__(self, core: Core, language: Language, sessions: SessionStore) -> None:
        self.core = core
        self.language = language
        self.sessions = sessions
        self.known: weakref.WeakValueDictionary[SessionKey, ChatSession] = weakref.WeakValueDictionary()
        self.lock = threading.RLock()

    def check(self, key: SessionKey, system: str | None) -> None:
        """What a session is asked for with. Raises RequestError, and as `Core.check_open`."""
        check_owner(key.tenant, "", 0)
        if system is not None:
            check_text(system, "system")
        self.language.chat_template()
        if system is not None:
            check_length([system], self.language.tokenizer, self.core.facts.max_request_tokens)
        self.core.check_open()

    def open(
        self,
        key: SessionKey,
        system: str | None = None,
        truncation: str | None = None,
        truncation_reuse: str | None = None,
        is_new: bool = False,
    ) -> ChatSession:
        """See `Engine.chat`; what it is asked for with was checked."""
        is_known = is_new or self.get(key) is not None
        state = None if is_known else self.sessions.load(key)  # outside the lock: it reads the disk
        with self.lock:
            self.core.check_open()
            chat = self.get(key)
            if chat is None:
                if not is_new and self.sessions.head(key) != (None if state is None else state.head):
                    state = self.sessions.load(key)  # it has gone on since
                chat = self.known[key] = ChatSession(self._means(), key, system, state)
            chat.set_truncation(truncation, truncation_reuse)
            return chat

    def get(self, key: SessionKey) -> ChatSession | None:
        """The object that somebody holds, unless what it told the core is lost."""
        chat = self.known.get(key)
        return chat if chat is not None and chat.life == self.core.life else None

    def drop(self, key: SessionKey) -> None:
        """Who asks for this session next gets a new object."""
        self.known.pop(key, None)

    def _means(self) -> Means:
        language = self.language
        return Means(self.core, language.tokenizer, language.chat_template(), self.sessions, self._reopened)

    def _reopened(self, key: SessionKey, truncation: str, truncation_reuse: str) -> ChatSession:
        self.drop(key)
        return self.open(key, None, truncation, truncation_reuse)

    def prefetch(self, session_id: str, tenant: str) -> None:
        """See `Engine.prefetch`."""
        self.core.check_open()
        key = SessionKey(tenant, session_id)
        state = self.sessions.load(key)
        if state is None and key in self.known:
            return  # it has no turn yet
        if state is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        if state.head.fingerprint != self.core.facts.fingerprint:
            return  # its KV is of another model
        lineage = lineage_of(state, self.core.root(tenant))
        self.core.prefetch(state.chain, state.token_ids, lineage, tenant)
