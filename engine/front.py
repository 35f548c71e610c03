"""What a program sees of an engine: prompts, conversations and administration, over a core that computes.

Loads no torch. Sessions and answers are here, whichever process the core is in.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from kvstore.admin.control import ControlServer
from kvstore.blocks.ids import BlockId, Lineage
from kvstore.disk.directory import StoreDirectory
from kvstore.engine.admin import Admin, weak_handler
from kvstore.engine.core.output_processor import Handle, Listener
from kvstore.engine.lifetime import Closing
from kvstore.engine.model.files import why_no_chat
from kvstore.engine.outputs import Piece, RequestOutput, describe_tiers
from kvstore.engine.rounds import Rounds
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.sessions.chats import Chats, Language
from kvstore.engine.sessions.core import Bell, Core, stream
from kvstore.engine.stats import EngineStats
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.prompts import checked_prompts, prompt_ids
from kvstore.errors import RemoteError, StoreLostError
from kvstore.sessions.answers import open_answers
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import SessionStore, open_sessions


class Front:
    """Made by `Engine` and `RemoteEngine`. A context manager.

    core: computes. facts: about the core. tokenizer: None if the model has none. chats, sessions: conversations.
    answers: answers that are recognised in a history. admin: evicts, verifies, compacts, lists and deletes sessions.
    """

    def __init__(
        self,
        core: Core,
        tokenizer: Any,
        directory: StoreDirectory | None,
        opened: ExitStack,
        shared: SessionStore | None = None,
    ) -> None:
        """opened: closed with this object, with all that it opens. directory: the store that this process owns. shared:
        sessions that several servers share, instead of those in the directory.
        """
        self.core = core
        self.facts = core.facts
        self.tokenizer = tokenizer
        self._tiers = describe_tiers(core.stats())  # asked now, since `repr` must not wait
        template = ChatTemplate.of(tokenizer)
        fault = None if template is None else template.fault()
        why_not = why_no_chat(core.facts.model_name, tokenizer is not None, fault)
        self.sessions = shared or open_sessions(directory)
        opened.callback(self.sessions.close)
        self.answers = open_answers(directory)
        opened.callback(self.answers.close)
        opened.callback(core.close)  # first, so that turns it ends can still be stored
        self.chats = Chats(core, Language(tokenizer, None if fault else template, why_not), self.sessions)
        self.admin = Admin(self.chats, self.answers)
        with suppress(RemoteError, StoreLostError):  # later rounds retry
            self.admin.resume()
        if self.sessions.sharing.is_shared:
            opened.callback(Rounds(self.admin).close)
        if directory is not None:
            opened.callback(ControlServer(directory, weak_handler(self.admin)).close)
        self._closing = Closing(opened.pop_all())
        # Also closes when it is dropped or the interpreter exits. A session keeps its engine alive.
        self._finalizer = weakref.finalize(self.chats, self._closing.close_dropped)

    # -- what is known of the core -----------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self.core.has_work

    @property
    def closed(self) -> bool:
        """Whether the engine accepts no more requests."""
        return self._closing.closed or self.core.closed

    # -- the library's interface -------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answer each prompt, a text or token ids. All run together; one output per prompt, in order.

        params: one for all, or one each; without `max_tokens` an answer may take all that is left of the window.
        tenant, cache_salt: prompts of different tenants or salts share no KV. Raises RequestError or ContextLengthError
        before anything runs, if one of them is wrong.
        """
        texts, each = checked_prompts(prompts, params)
        ids = [prompt_ids(prompt, self.tokenizer, self.facts.vocab_size) for prompt in texts]
        bell = Bell(only_ends=True)
        asked = list(zip(ids, each, strict=True))
        handles = self.core.submit_all(asked, tenant, cache_salt, priority, listener=bell)
        try:
            for handle in handles:
                bell.wait(lambda: handle.done)  # noqa: B023 (it is asked here only)
                handle.raise_error()
        finally:
            for handle in handles:
                self.core.abort(handle)
        return [handle.output for handle in handles]

    def chat(
        self,
        session_id: str,
        tenant: str = "",
        system: str | None = None,
        truncation: str | None = None,
        truncation_reuse: str | None = None,
        is_new: bool = False,
    ) -> ChatSession:
        """The session of this id, created when unknown, else resumed. system: its system prompt, for a new one only.

        While anybody holds the object of a session, all callers get the same object. After a restart of the engine's
        own process, ask for it again. truncation: "auto" drops the oldest turns when the window is full, "disabled"
        raises ContextLengthError instead. truncation_reuse: "reencode" keeps the KV of what is kept, "exact" computes
        it again. None leaves them unchanged; a new object has "auto" and "reencode". Neither is stored with the
        session. is_new: nobody has used this id so far, so the store need not be searched. Raises RequestError for a
        bad id or a model without a chat template, StoreError if the session cannot be read.
        """
        key = SessionKey(tenant, session_id)
        self.chats.check(key, system)
        if not is_new:
            self.admin.expire(key)
        return self.chats.open(key, system, truncation, truncation_reuse, is_new)

    def prefetch(self, session_id: str, tenant: str = "") -> None:
        """A hint that this session's person is typing. Raises RequestError when there is no such session."""
        self.chats.prefetch(session_id, tenant)

    def flush(self) -> None:
        """Returns when every finished block is synced on disk; at once without a disk tier.

        Raises DegradedError when the disk cannot write.
        """
        self.core.flush()

    def stats(self) -> EngineStats:
        """Counters and gauges as a plain dict; step times are running totals in seconds."""
        return self.admin.stats()

    def close(self) -> None:
        """End running requests as aborted and close the store. Does nothing in a forked child."""
        self._closing.close()

    def __dir__(self) -> list[str]:
        return "admin chat close closed facts flush generate prefetch stats tokenizer".split()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self._tiers
        return f"{type(self).__name__}({self.facts.model_name!r}, window {self.facts.max_model_len}, {state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests ----------------------------------------------------------------------------------------------------
    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: tuple[Sequence[BlockId], Lineage] | None = None,
        listener: Listener | None = None,
        turn_starts: Sequence[int] = (),
    ) -> Handle:
        """Queue one prompt of token ids; never waits. Raises as `generate`.

        spliced: the chain of its first blocks, if these hold reused KV, and that chain's lineage. listener: is notified
        of its pieces; without one, `stream` yields them. turn_starts: where in the prompt each turn begins, as far as
        known: others may go on from there in another way. Raises EngineOverloadedError if the engine's process has too
        many requests, EngineDiedError if it has ended.
        """
        prompts = [(token_ids, params)]
        return self.core.submit_all(prompts, tenant, cache_salt, priority, spliced, listener, turn_starts)[0]

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """Pieces of a submitted request as they come; leaving the loop early aborts it."""
        return stream(self.core, handle)

    def abort(self, handle: Handle) -> None:
        """End a request; its blocks are released on return. Does nothing if it is done or the engine is closed."""
        self.core.abort(handle)

    def root(self, tenant: str) -> BlockId:
        """The lineage root of this tenant's chains."""
        return self.core.root(tenant)
