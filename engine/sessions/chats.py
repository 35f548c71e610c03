"""Sessions of an engine by their ids: opened, and hinted at. The engine may be one in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.engine.model.files import why_no_chat
from kvstore.engine.sessions.chat import ChatSession, lineage_of
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.prompts import check_length, check_owner, check_session_id, check_text, check_truncation
from kvstore.errors import RequestError, SessionNotFoundError
from kvstore.sessions.record import SessionKey

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine


def open_chat(
    engine: Engine,
    template: ChatTemplate | None,
    key: tuple[str, str],
    system: str | None,
    truncation: str | None,
    truncation_reuse: str | None,
    is_new: bool = False,
) -> ChatSession:
    """See `Engine.chat`. key: tenant and session id. While somebody holds the object of a session, there is one.

    is_new: nobody knows this id so far, so it is not looked for.
    """
    tenant, session_id = key
    check_session_id(session_id)
    check_owner(tenant, "", 0)
    if system is not None:
        check_text(system, "system")
    if template is None:
        raise RequestError(why_no_chat(engine.model_name, engine.tokenizer is not None), param="messages")
    if system is not None:
        check_length([system], engine.tokenizer, engine.max_request_tokens)
    check_truncation(
        "auto" if truncation is None else truncation, "reencode" if truncation_reuse is None else truncation_reuse
    )
    engine.check_open()
    name = SessionKey(tenant, session_id)
    if not is_new:
        engine.admin.expire(name)
    state = None if is_new or name in engine.chats else engine.sessions.load(name)  # no step waits for the disk
    with engine.chats_lock:
        engine.check_open()
        chat = engine.chats.get(name)
        if chat is None:
            if not is_new and engine.sessions.head(name) != (None if state is None else state.head):
                state = engine.sessions.load(name)  # it has gone on since
            chat = engine.chats[name] = ChatSession(engine, template, name, system, state)
        chat.set_truncation(truncation, truncation_reuse)
        return chat


def prefetch_chat(engine: Engine, session_id: str, tenant: str) -> None:
    """See `Engine.prefetch`."""
    engine.check_open()
    check_session_id(session_id)
    key = SessionKey(tenant, session_id)
    state = engine.sessions.load(key)
    if state is None and key in engine.chats:
        return  # it has no turn yet
    if state is None:
        raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
    if state.head.fingerprint != engine.fingerprint:
        return  # its KV is of another model
    engine.connector.prefetch(state.chain, state.token_ids, lineage_of(state, engine.root(tenant)), tenant)
