"""`Engine`: prompts, conversations and administration, over a core that computes in this process or in its own.

Loads no torch before a core is opened. Sessions and answers are here, whichever process the core is in.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from kvstore.admin.control import ControlServer
from kvstore.blocks.ids import Lineage
from kvstore.config import CacheTiers
from kvstore.connector import KVConnector, hold_store
from kvstore.disk.directory import StoreDirectory
from kvstore.engine.admin import Admin, weak_handler
from kvstore.engine.client.messages import Core, Flush, ReadStats
from kvstore.engine.client.opening import check_process, open_here, open_own
from kvstore.engine.client.requests import Bell, CoreClient
from kvstore.engine.config import EngineConfig
from kvstore.engine.core.step_loop import StepLoop
from kvstore.engine.model.files import why_no_chat
from kvstore.engine.outputs import RequestOutput, describe_tiers
from kvstore.engine.progress import shown
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import Chats, ChatSession
from kvstore.engine.sessions.spans import with_spans
from kvstore.engine.stats import EngineStats
from kvstore.engine.text.chat_template import ChatTemplate, Message, without_marks
from kvstore.engine.text.language import Language, no_parser
from kvstore.engine.text.prompts import (
    ToolsGiven,
    check_length,
    check_owner,
    check_text,
    checked_messages,
    checked_prompts,
    is_conversation,
    options_of,
    prompt_ids,
)
from kvstore.engine.text.response_template import choose_template
from kvstore.errors import KVStoreError, StoreError, StoreLockedError
from kvstore.sessions.answers import open_answers
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import SessionStore, open_sessions

T = TypeVar("T")
ROUND_S = 5.0
LOCK_WAIT_S = 5.0
LOCK_RETRY_S = 0.1
OWN_THREADS = "kvstore-"  # with which the names of our threads begin


class Engine:
    """A language model with a paged, prefix-cached KV pool.

    model: None for the built-in chat model, a local Hugging Face directory, or a hub id.
    cache_tiers: CacheTiers or a dict of hbm, cpu, disk, path. hbm "auto" takes the free memory of a CUDA device; on a
        CPU a quarter of the memory that is available at the start, at most what 4 * max_num_seqs full windows need
        (`stats()["hbm"]` says how much). With a disk tier, KV and sessions outlive the process; path has one owner.
    device, dtype: "auto" picks CUDA if there is a device, and the dtype of the checkpoint.
    block_size: tokens per block. max_model_len: the window, at most the model's own.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step, of all requests together.
    load: "auto" loads stored KV unless computing it is predicted to be clearly faster; "always" loads what is stored.
    seed: for requests without a seed of their own.
    policy: "fcfs" or "priority" (lower values first): the order of a tenant's requests. Tenants share equally.
    eviction: which of the blocks that no waiting request needs is evicted first: "fifo", "lru", "return" (the least
        likely to return soon, learned from this store's own traffic), or "auto", which is "return".
    tokenizer: directory or hub id of another tokenizer than the model's. revision: branch, tag or commit of a hub id.
    enforce_eager: True launches every kernel of a decode step separately instead of replaying CUDA graphs.
    chat_template: a file with a Jinja template, or its text, instead of the tokenizer's.
    kv_events: an endpoint such as "tcp://*:5557" where routers are told which KV is held; kv_events_topic: of these
        messages. They hold token ids, which are text.
    session_store: a Redis, such as "redis://host:6379/0", in which several engines share their sessions; all need the
        same secret (cache_tiers' fleet_secret_file). session_durability, session_replicas: what that Redis must promise
        for a stored turn, see docs/fleet.md.
    tensor_parallel_size: how many processes share each layer's weights and KV heads. pipeline_parallel_size: how many
        processes, or groups of tensor_parallel_size, share the layers. This process is one of them, and each has its
        own hbm. When one ends, EngineDiedError is raised until another Engine is opened. distributed_executor: "here"
        starts them, and "ray" has them started by the cluster of this machine; see docs/parallel.md.
    progress: True shows on stderr what takes long while the engine starts. The logger "kvstore.engine" gets a record of
        each stage either way.

    process: "here" computes in this process; "own" in a process of its own, as the server does. When that ends, running
        requests end with EngineDiedError, and another one is started, max_restarts times within an hour. Sessions are
        not in it: they go on after a restart, and can be read during it. If another process holds the store, it waits
        a while, because that may be about to end. shutdown_s: how long `close` waits for the process before it kills
        it. silence_s: how long it, or another rank, may give no sign of life, at least 2 s; loading and a single step
        may take ten times as long.
    tool_call_parser: how the model writes calls, by vLLM's name such as "hermes"; None: as its chat template says.
    state_dtype: how the states of linear attention and Mamba are stored below HBM: "auto", as they are, to the bit;
        "bfloat16" halves them. state_share: how much of the HBM tier they take at most, .05 to .95; half of that is for
        checkpoints. Below HBM these are evicted by their value, as KV is.
    data_parallel_size: with "own", how many engines compute, each with the whole model. They share the disk tier and
        divide the CPU tier; hbm, and what concerns a batch, is of each. When one ends, the others go on.

    facts: about the core. tokenizer: None if the model has none. chats, sessions: conversations. answers: answers that
    are recognised in a history. admin: evicts, verifies, compacts, lists and deletes sessions. client: of the core.

    Raises ConfigError, ModelError, UnsupportedModelError, StoreError or StoreLockedError. A context manager.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        cache_tiers: CacheTiers | Mapping[str, object] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        load: str = "auto",
        seed: int = 0,
        policy: str = "fcfs",
        eviction: str = "auto",
        tokenizer: str | None = None,
        revision: str | None = None,
        enforce_eager: bool = False,
        chat_template: str | None = None,
        kv_events: str | None = None,
        kv_events_topic: str | None = None,
        session_store: str | None = None,
        session_durability: str = "always",
        session_replicas: int | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        distributed_executor: str = "here",
        progress: bool = False,
        data_parallel_size: int = 1,
        process: str = "here",
        tool_call_parser: str | None = None,
        state_dtype: str = "auto",
        state_share: float = 0.5,
        *,
        shutdown_s: float = 10.0,
        silence_s: float = 30.0,
        max_restarts: int = 6,
    ) -> None:
        tiers = CacheTiers.of(cache_tiers)
        config = EngineConfig(
            model, tiers, device, dtype, block_size, max_model_len, max_num_seqs, max_num_batched_tokens, load, seed,
            policy, eviction, tokenizer, revision, enforce_eager, chat_template, kv_events, kv_events_topic,
            session_store, session_durability, session_replicas, tensor_parallel_size, pipeline_parallel_size,
            distributed_executor, tool_call_parser, state_dtype, state_share, data_parallel_size,
        )  # fmt: skip
        check_process(config, process, silence_s)
        with ExitStack() as opened, shown(progress):
            # First, so that a store in use is noticed before weights are read.
            hold = partial(hold_store, tiers)
            directory = hold() if process == "here" else open_waiting_for_lock(hold)
            if directory is not None:
                opened.callback(directory.close)
            shared = None
            if (sharing := config.shared_sessions()) is not None:
                from kvstore.sessions.shared.opening import open_shared_sessions  # redis-py: half a second to import

                shared = open_shared_sessions(sharing, directory)
                opened.callback(shared.close)
            self.core: Core
            if process == "here":
                self.core, self.tokenizer = open_here(config, directory, silence_s, opened)
            else:
                self.core, self.tokenizer = open_own(config, directory, silence_s, shutdown_s, max_restarts, opened)
            self._open_front(directory, shared, opened, tool_call_parser)

    def _open_front(
        self, directory: StoreDirectory | None, shared: SessionStore | None, opened: ExitStack,
        parser: str | None = None,
    ) -> None:  # fmt: skip
        """Conversations, over the core. opened: closed with this object. shared: sessions that several servers share,
        instead of those in the directory. parser: `tool_call_parser`.
        """
        tokenizer, self.facts = self.tokenizer, self.core.facts
        self.client = CoreClient(self.core, None if tokenizer is None else tokenizer.backend_tokenizer)
        self.submit, self.stream, self.abort = self.client.submit, self.client.stream, self.client.abort
        self._tiers = describe_tiers(self.client.call(ReadStats()))  # asked now, since `repr` must not wait
        template = ChatTemplate.of(tokenizer)
        fault = None if template is None else template.fault()
        why_not = why_no_chat(self.facts.model_name, tokenizer is not None, fault)
        self.sessions = shared or open_sessions(directory)
        opened.callback(self.sessions.close)
        self.answers = open_answers(directory)
        opened.callback(self.answers.close)
        opened.callback(self.core.close)  # first, so that turns it ends can still be stored
        answers = None if template is None else choose_template(tokenizer, parser)
        language = Language(tokenizer, None if fault else template, why_not, answers)
        self.chats = Chats(self.client, language, self.sessions, self.answers)
        self.admin = Admin(self.chats)
        with suppress(StoreError):  # a full disk, say: later rounds retry
            self.admin.resume()
        opened.callback(_carry_out_deletions(self.admin))
        if directory is not None:
            opened.callback(ControlServer(directory, weak_handler(self.admin)).close)
        self._closing = Closing(opened.pop_all())
        # Also closes when it is dropped or the interpreter exits. A session keeps its engine alive.
        self._finalizer = weakref.finalize(self.chats, self._closing.close_dropped)

    # -- what is known of the core -----------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self.client.has_work

    @property
    def closed(self) -> bool:
        """Whether the engine accepts no more requests."""
        return self._closing.closed or self.client.closed

    # -- the library's interface -------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[Message]] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        tools: ToolsGiven = (),
    ) -> list[RequestOutput]:
        """Answer each prompt: a text, token ids, or the messages of a conversation. All run together; one output per
        prompt, in order.

        params: one for all, or one each; without `max_tokens` an answer may take all that is left of the window.
        tenant, cache_salt: prompts of different tenants or salts share no KV. tools: for messages, as in chat
        completions, or AnswerOptions. Raises RequestError or ContextLengthError before anything runs, if one is wrong.
        """
        texts, each = checked_prompts(prompts, params)
        check_owner(tenant, cache_salt, priority)
        language, options = self.chats.language, options_of(tools)
        template = language.chat_template(options) if texts and all(map(is_conversation, texts)) else None
        made = [self._ids(prompt, template) for prompt in texts]
        parser = no_parser
        if template is not None:
            parser, each = language.parser(options), [language.constrained(params, options) for params in each]
        bell, before = Bell(only_ends=True), ((), Lineage(self.facts.root(tenant, cache_salt)))
        asked = [(ids, params) for (ids, _), params in zip(made, each, strict=True)]
        spliced = [
            with_spans(self.client, ids, spans, tenant, before)[0] if spans and not params.kv_exact else None
            for (ids, spans), params in zip(made, each, strict=True)
        ]
        handles = self.client.submit_all(asked, tenant, cache_salt, priority, spliced, bell, parser=parser)
        try:
            for handle in handles:
                bell.wait(lambda: handle.done)  # noqa: B023 (it is asked here only)
                handle.raise_error()
        finally:
            for handle in handles:
                self.client.abort(handle)
        return [handle.output for handle in handles]

    def _ids(self, prompt: Any, template: ChatTemplate | None) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids, and the ranges of spans in them. template: for messages."""
        if template is None:
            return prompt_ids(prompt, self.tokenizer, self.facts.vocab_size), []
        return without_marks(template.prompt_ids(template.marked(checked_messages(prompt))))

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
        key, language = SessionKey(tenant, session_id), self.chats.language
        check_owner(tenant, "", 0)
        if system is not None:
            check_text(system, "system")
        language.chat_template()
        if system is not None:
            check_length([system], language.tokenizer, self.client.facts.max_request_tokens)
        self.client.check_open()
        return self.chats.open(key, system, truncation, truncation_reuse, is_new)

    def prefetch(self, session_id: str, tenant: str = "") -> None:
        """A hint that this session's person is typing. Raises RequestError when there is no such session."""
        self.admin.prefetch(session_id, tenant)

    def flush(self) -> None:
        """Returns when every finished block is synced on disk; at once without a disk tier.

        Raises DegradedError when the disk cannot write.
        """
        self.client.call(Flush())

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

    # -- for tests and measurements, where the core is in this process ------------------------------------------------
    @property
    def loop(self) -> StepLoop:
        return self._local.loop

    @property
    def connector(self) -> KVConnector:
        return self._local.connector

    @property
    def _local(self) -> Any:
        """A `LocalCore`, whose module loads torch."""
        return self.core

    def check_integrity(self) -> None:
        """Assert that all counts agree, and that nothing is held when nothing runs."""
        self.loop.call(self.loop.check_integrity)


def _carry_out_deletions(admin: Admin) -> Callable[[], None]:
    """Delete what has expired and carry out other servers' deletions, every few seconds, until the result is called.
    Keeps no engine alive that its owner has dropped.
    """
    held, closed = weakref.ref(admin), threading.Event()
    del admin

    def run() -> None:
        while not closed.wait(ROUND_S) and (found := held()) is not None:
            with suppress(KVStoreError):  # the server is away, or the engine is closing; the next round retries
                found.resume()
            del found

    def close() -> None:
        closed.set()
        if threading.current_thread() is not thread:  # this thread may be the one that dropped the engine
            thread.join()

    thread = threading.Thread(target=run, name="kvstore-rounds", daemon=True)
    thread.start()
    return close


class Closing:
    """Closes everything that an engine has opened: once, the last first, and each even if others raise.

    closed: whether closing has begun. Does nothing in a forked child: threads and files are the parent's.
    """

    def __init__(self, opened: ExitStack) -> None:
        self.closed = False
        self._opened = opened
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held while closing

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self.closed:
                self.closed = True
                self._opened.close()

    def close_dropped(self) -> None:
        """Close a dropped engine.

        The collector may run in any thread, even in one for which `close` waits. In that case a new thread closes it.
        """
        if threading.current_thread().name.startswith(OWN_THREADS) and os.getpid() == self._pid:
            threading.Thread(target=self.close, name="engine-shut").start()
        else:
            self.close()


def open_waiting_for_lock(opened: Callable[[], T], timeout_s: float = LOCK_WAIT_S) -> T:
    """Retry `opened` while another process, which may be about to end, holds the store's lock.

    Raises StoreLockedError if the lock is still held at the end.
    """
    deadline: float | None = None
    while True:
        try:
            return opened()
        except StoreLockedError:
            now = time.monotonic()
            deadline = now + timeout_s if deadline is None else deadline
            if now >= deadline:
                raise
            time.sleep(min(LOCK_RETRY_S, max(0.0, deadline - now)))
