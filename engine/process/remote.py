"""RemoteEngine: an Engine whose core runs in a process of its own. Text is made here, tokens there.

So tokenizing, templates, detokenizing and HTTP do not share an interpreter with the engine's steps.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict
from kvstore.config import CacheTiers
from kvstore.engine.admin import Admin
from kvstore.engine.blocking import Bell, generate, stream
from kvstore.engine.config import EngineConfig
from kvstore.engine.core.output_processor import Handle, Listener
from kvstore.engine.model.files import find_model
from kvstore.engine.model.loading import load_tokenizer
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.process.link import POLL_S, Link, State, close_dropped
from kvstore.engine.process.parts import RemoteAnswers, RemoteConnector, RemoteSessions
from kvstore.engine.process.pulse import MIN_SILENCE_S
from kvstore.engine.process.wire import Submit, encode, owner_to_wire, params_to_wire
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.sessions.chats import open_chat, prefetch_chat
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.prompts import check_fits, check_ids, check_ids_of, check_owner, check_params, check_session_id
from kvstore.errors import ConfigError, EngineOverloadedError, KVStoreError
from kvstore.sessions.record import SessionKey

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine

MAX_REQUESTS = 16384  # in the engine's process at once; a bound for what is queued between the two


class RemoteEngine:
    """Takes what `Engine` takes, and is used as it is. A context manager.

    state: "running"; "restarting" after the process has ended, which ends all that ran with EngineDiedError; "failed"
    when that has happened more than max_restarts times within an hour, where a restart that fails counts as well;
    "closed". Sessions go on after a restart.
    shutdown_s: how long `close` waits for the process before it kills it. silence_s: the same while it runs and gives
    no sign of life, from 2 s; loading may take ten times as long without one, and so may one step.
    Raises as Engine, and EngineDiedError when the process ends before the engine is there.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        cache_tiers: CacheTiers | Mapping[str, object] | None = None,
        *,
        shutdown_s: float = 10.0,
        silence_s: float = 30.0,
        max_restarts: int = 6,
        **options: Any,
    ) -> None:
        config = EngineConfig(model, CacheTiers.of(cache_tiers), **options)
        find_model(config.model, config.revision, with_weights=False)  # before a process is started for nothing
        if not silence_s >= MIN_SILENCE_S:
            raise ConfigError(f"silence_s is {silence_s!r}; give seconds from {MIN_SILENCE_S:g}")
        self._shutdown_s = shutdown_s
        self._link = link = Link(_arguments(config), shutdown_s, silence_s, max_restarts)
        self._finalizer = weakref.finalize(self, close_dropped, link)
        try:
            self.tokenizer = load_tokenizer(config.model, config.tokenizer, config.revision, config.chat_template)
            self._backend = None if self.tokenizer is None else self.tokenizer.backend_tokenizer
            self._template = None if self.tokenizer is None else ChatTemplate.of(self.tokenizer)
            link.wait_until_started()
        except BaseException:
            self._finalizer()
            raise
        self.chats_lock = threading.RLock()
        self.sessions = RemoteSessions(link)
        self.answers = RemoteAnswers(link)
        self.connector = RemoteConnector(link)
        self._counter = itertools.count()
        self.admin = Admin(self._verbs)

    # -- what is known of the engine ---------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        return self._link.state

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's process gave a sign of life, which comes every half second."""
        return self._link.silent_s

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None while there is none."""
        return self._link.pid

    @property
    def model_name(self) -> str:
        return self._link.hello.model_name

    @property
    def max_model_len(self) -> int:
        return self._link.hello.max_model_len

    @property
    def max_request_tokens(self) -> int:
        return self._link.hello.max_request_tokens

    @property
    def block_size(self) -> int:
        return self._link.hello.block_size

    @property
    def block_bytes(self) -> int:
        return self._link.hello.block_bytes

    @property
    def vocab_size(self) -> int:
        return self._link.hello.vocab_size

    @property
    def fingerprint(self) -> bytes:
        return self._link.hello.fingerprint

    @property
    def sampling_defaults(self) -> dict[str, float]:
        return self._link.hello.sampling_defaults

    @property
    def chats(self) -> weakref.WeakValueDictionary[SessionKey, ChatSession]:
        return self._link.chats

    @property
    def closed(self) -> bool:
        """It takes no requests any more."""
        return self.state in ("closed", "failed")

    @property
    def has_work(self) -> bool:
        return len(self._link.outputs) > 0 or bool(self._link.undelivered)

    @property
    def _verbs(self) -> Engine:
        """Itself: what knows an engine by its verbs takes this one."""
        return cast("Engine", self)

    def check_open(self) -> None:
        self._link.check_open()

    # -- the library's interface -------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> list[RequestOutput]:
        return generate(self._verbs, prompts, params, tenant, cache_salt, priority)

    def chat(
        self,
        session_id: str,
        tenant: str = "",
        system: str | None = None,
        truncation: str | None = None,
        truncation_reuse: str | None = None,
        is_new: bool = False,
    ) -> ChatSession:
        """See `Engine.chat`. After a restart of the process, ask for the session again."""
        check_session_id(session_id)
        key = SessionKey(tenant, session_id)
        with self.chats_lock:
            known = self.chats.get(key)
            if known is not None and not known.is_busy and known._is_gone():
                self.chats.pop(key, None)  # somebody deleted it at the store's own socket
        names = (tenant, session_id)
        return open_chat(self._verbs, self._template, names, system, truncation, truncation_reuse, is_new)

    def prefetch(self, session_id: str, tenant: str = "") -> None:
        prefetch_chat(self._verbs, session_id, tenant)

    def flush(self) -> None:
        self._link.call("flush")

    def stats(self) -> dict[str, object]:
        """The engine's, and of its process."""
        link = self._link
        process = {"state": link.state, "pid": link.pid, "restarts": link.num_restarts, "requests": len(link.outputs)}
        return {**link.call("stats"), "process": process}

    def close(self) -> None:
        self._finalizer.detach()
        self.answers.settle(self._shutdown_s)
        self._link.close()

    def __enter__(self) -> RemoteEngine:
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
    ) -> Handle:
        """See `Engine.submit`. Raises EngineOverloadedError at MAX_REQUESTS, EngineDiedError without a process."""
        check_owner(tenant, cache_salt, priority)
        check_params(params)
        check_ids(token_ids, self.vocab_size)
        check_ids_of(params, self.vocab_size)
        self.max_output_tokens(token_ids, params)
        request_id = f"request-{next(self._counter)}"
        tenant_bytes, salt = owner_to_wire(tenant), owner_to_wire(cache_salt)
        beginning = None if spliced is None else (list(spliced[0]), spliced[1])
        message = encode(Submit(request_id, token_ids, params_to_wire(params), tenant_bytes, salt, priority, beginning))
        link = self._link
        with link.lock:
            life = link.check_open()
            if len(link.outputs) >= MAX_REQUESTS:
                raise EngineOverloadedError(f"{MAX_REQUESTS} requests run or wait; try again")
            link.read()
            handle = link.outputs.add(request_id, token_ids, params, self._backend, self.block_size, listener or Bell())
            try:
                life.send(message)
            except KVStoreError as error:
                link.outputs.end(handle, error)
                raise
        return handle

    def submit_all(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: tuple[Sequence[BlockId], Lineage] | None = None,
        listener: Listener | None = None,
    ) -> list[Handle]:
        """See `Engine.submit_all`."""
        for token_ids, params in prompts:
            self.max_output_tokens(token_ids, params)
        handles: list[Handle] = []
        try:
            for token_ids, params in prompts:
                handles.append(self.submit(token_ids, params, tenant, cache_salt, priority, spliced, listener))
        except BaseException:
            for handle in handles:
                self.abort(handle)
            raise
        return handles

    def fileno(self) -> int:
        """A descriptor, the same all the time, that can be read when there is something to `receive`."""
        return self._link.selector.fileno()

    def read_here(self) -> None:
        """From now on, and before `submit`, this thread calls `receive`. It must not wait for the engine."""
        self._link.reader = threading.current_thread()

    def receive(self) -> None:
        """Take in what has come from the process, and tell who listens; never waits."""
        self._link.receive()

    def abort(self, handle: Handle, index: int | None = None, reason: str = "abort") -> None:
        """See `Engine.abort`. Returns when the engine's process has said the last of it; who reads does not wait."""
        link = self._link
        with link.changed:
            if not link.outputs.is_running(handle):
                return
            link.end_request(handle.request_id, index, reason)
            while index is None and not handle.done and link.reader is not threading.current_thread():
                link.changed.wait(POLL_S)

    def stream(self, handle: Handle) -> Iterator[Piece]:
        return stream(self._verbs, handle)

    def max_output_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        return check_fits(len(token_ids), params, self.max_model_len, self.max_request_tokens)

    # -- what chat sessions and administration need ------------------------------------------------------------------
    def root(self, tenant: str) -> BlockId:
        roots = self._link.roots
        found = roots.get(tenant)
        if found is None:
            found = self._link.call("root", tenant)
            roots[tenant] = found
        return found

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str = "",
    ) -> tuple[list[BlockId], Lineage] | None:
        return self._link.call("splice", chain, token_ids, lineage, spans, tenant)

    def expire_kv(self, chain: Sequence[BlockId], at_s: float | None) -> None:
        self._link.call("expire_kv", chain, at_s)

    def pin_kv(self, chain: Sequence[BlockId], seconds: float) -> None:
        self._link.call("pin_kv", chain, seconds)

    def forget_hbm(self, block_ids: Iterable[BlockId]) -> None:
        """`RemoteConnector.forget` does."""

    def evict_hbm(self, what: Evict, block_ids: frozenset[BlockId]) -> int:
        """`RemoteConnector.evict` does, and says how many."""
        return 0


def _arguments(config: EngineConfig) -> dict[str, Any]:
    """Of `Engine`, as JSON can say them."""
    arguments = asdict(config)
    tiers = arguments.pop("tiers")
    arguments["cache_tiers"] = {**tiers, "path": None if tiers["path"] is None else str(tiers["path"])}
    arguments["model"] = None if config.model is None else str(config.model)
    return arguments
