"""The engine: prompts in, tokens out. Ties the loop that steps, the tiers and sessions together.

Any thread may call it, and waits for `kvstore.engine.core.step_loop`, the only one that steps.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Evict
from kvstore.config import CacheTiers
from kvstore.connector import hold_store
from kvstore.disk.directory import StoreDirectory
from kvstore.engine.admin import Admin, weak_handler
from kvstore.engine.blocking import Bell, generate, stream
from kvstore.engine.config import EngineConfig
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.output_processor import Handle, Listener, OutputProcessor, new_handle
from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduler
from kvstore.engine.core.step_loop import StepLoop
from kvstore.engine.lifetime import Gate, shut, shut_dropped
from kvstore.engine.model.loading import load
from kvstore.engine.model.memory import num_hbm_blocks
from kvstore.engine.model.probe import intercept
from kvstore.engine.model.step.graphs import CudaCapturer
from kvstore.engine.model.step.runner import ModelRunner
from kvstore.engine.model.step.waiting import WAITING
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.sessions.chats import open_chat, prefetch_chat
from kvstore.engine.storage import check_room, open_store
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.choice_text import ChoiceText
from kvstore.engine.text.prompts import check_fits, check_ids, check_ids_of, check_owner, check_params
from kvstore.errors import EngineClosedError
from kvstore.kernels.cpu.threads import let_helpers_go
from kvstore.kernels.cuda.triton_support import has_triton
from kvstore.sessions.answers import AnswerStore, open_answers
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import SessionStore, open_sessions


class Engine:
    """A language model with a paged, prefix-cached KV pool.

    model: None for the built-in chat model, a local Hugging Face directory, or a hub id.
    cache_tiers: CacheTiers or a dict of hbm, cpu, disk, path. hbm "auto" takes what a CUDA device has left; on a CPU a
        quarter of the memory that is available at the start, at most what 4 * max_num_seqs full windows need
        (`stats()["hbm"]` says how much). With a disk tier KV and sessions outlive the process; path has one owner.
    device, dtype: "auto" picks CUDA where there is one, and the dtype of the checkpoint.
    block_size: tokens per block. max_model_len: the window, at most the model's own.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step, of all requests together.
    load: "auto" loads stored KV unless computing it is predicted to be clearly faster; "always" loads what is stored.
    seed: of sampling without a seed of its own.
    policy: "fcfs" or "priority" (lower values first): the order of a tenant's requests. Tenants share equally.
    eviction: what goes first of what no waiting request needs: "fifo", "lru", "return" (least likely to return soon,
        learned from this store's own traffic), or "auto", which is "return".
    tokenizer: directory or hub id of another one than the model's. revision: branch, tag or commit of a hub id.
    enforce_eager: True launches every kernel of a decode step by itself instead of replaying CUDA graphs.
    chat_template: a file with a Jinja template, or its text, instead of the tokenizer's.

    `admin` evicts, verifies, compacts, and lists and deletes sessions (see `engine.admin`).

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
    ) -> None:
        tiers = CacheTiers.of(cache_tiers)
        config = EngineConfig(
            model, tiers, device, dtype, block_size, max_model_len, max_num_seqs, max_num_batched_tokens, load, seed,
            policy, eviction, tokenizer, revision, enforce_eager, chat_template,
        )  # fmt: skip
        with ExitStack() as failing:
            with WAITING.allowed():
                directory = hold_store(tiers)  # first: a store that cannot be had is found before weights are read
                if directory is not None:
                    failing.callback(directory.close)
                self._build(config, directory, failing)
            # Also when the engine is collected or the interpreter exits: no step may run while Python is torn down.
            parts = (self._gate, self.loop, self.connector, self.sessions, self.answers)
            self._finalizer = weakref.finalize(self, shut_dropped, *parts)
            failing.pop_all()
            failing.callback(self.close)
            let_helpers_go()  # from now on the loop's thread computes
            self.loop.start()
            self.admin.resume()
            self.connector.serve(weak_handler(self.admin))
            failing.pop_all()

    def _build(self, config: EngineConfig, directory: StoreDirectory | None, failing: ExitStack) -> None:
        def check(network: Any, tokenizer: Any) -> None:
            check_room(config, network)
            if config.chat_template is not None and (template := ChatTemplate.of(tokenizer)) is not None:
                template.check()

        loaded = load(
            config.model, config.device, config.dtype, config.max_model_len, config.tokenizer, config.revision,
            config.chat_template, check,
        )  # fmt: skip
        self.model_name = loaded.name
        self.max_model_len = loaded.max_model_len
        self.tokenizer = loaded.tokenizer
        self.sampling_defaults = loaded.sampling_defaults
        self._config = config
        self._eos_token_ids = loaded.eos_token_ids
        self._call_token_ids = loaded.call_token_ids
        model = intercept(loaded.model, loaded.max_model_len, pack=True)
        self.spec = model.spec
        limits = config.scheduler(loaded.max_model_len)
        has_graphs = loaded.device.type == "cuda" and has_triton() and not config.enforce_eager
        has_store = bool(config.tiers.cpu or config.tiers.disk)
        self._num_blocks = num_hbm_blocks(model, limits, config.tiers.hbm, has_graphs, has_store)
        with torch.cuda.device_of(next(loaded.model.parameters())):  # whose context pins the arena
            self.connector = open_store(config, loaded, model, self._num_blocks, directory)
        failing.callback(self.connector.close)
        pool = BlockPool(self._num_blocks, self.connector.hbm_order)
        capturer = CudaCapturer(loaded.device) if has_graphs else None
        runner = ModelRunner(model, limits, self._num_blocks, self.connector, capturer)
        backend = None if loaded.tokenizer is None else loaded.tokenizer.backend_tokenizer
        self.loop = StepLoop(
            Scheduler(limits, KVCacheManager(pool, limits.block_size), self.connector),
            runner,
            OutputProcessor(partial(ChoiceText, tokenizer=backend)),
            runs_ahead=loaded.device.type == "cuda",
        )
        self._template = ChatTemplate.of(loaded.tokenizer)
        self.sessions: SessionStore = open_sessions(self.connector.directory)
        self.answers: AnswerStore = open_answers(self.connector.directory)
        self.chats: weakref.WeakValueDictionary[SessionKey, ChatSession] = weakref.WeakValueDictionary()
        self.chats_lock = threading.RLock()
        self.admin = Admin(self)
        self._gate = Gate()
        self._random = random.Random(config.seed)
        self._counter = itertools.count()

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

        params: one for all, or one each. tenant and cache_salt: prompts of another tenant or salt share no KV.
        Raises RequestError or ContextLengthError before anything runs when one of them is wrong.
        """
        return generate(self, prompts, params, tenant, cache_salt, priority)

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

        While somebody holds the object of a session, all who ask for it get the same one.
        truncation: "auto" drops the oldest turns when the window is full, "disabled" raises ContextLengthError instead.
        truncation_reuse: "reencode" keeps the KV of what is kept, "exact" computes it again. None leaves both as they
        are: "auto" and "reencode" for a new object; they are not stored with the session.
        is_new: nobody has used this id so far, so it is not looked for in the store.
        Raises RequestError for a bad id or a model without a chat template, StoreError when it cannot be read.
        """
        return open_chat(self, self._template, (tenant, session_id), system, truncation, truncation_reuse, is_new)

    def prefetch(self, session_id: str, tenant: str = "") -> None:
        """A hint that this session's person is typing. Raises RequestError when there is no such session."""
        prefetch_chat(self, session_id, tenant)

    def flush(self) -> None:
        """Returns when every finished block is synced on disk; at once without a disk tier.

        Raises DegradedError when the disk cannot write.
        """
        self.check_open()
        self.connector.flush()

    def stats(self) -> dict[str, object]:
        """Counters and gauges as a plain dict; step times are running totals in seconds."""
        shape = {"block_bytes": self.block_bytes, "block_size": self.block_size}
        stats = self.loop.call(self.loop.stats, {**shape, "is_auto": self._config.tiers.hbm == "auto"})
        return {"model": self.model_name, **stats, "sessions": self.sessions.stats()}

    def close(self) -> None:
        """End running requests as aborted and close the store. Does nothing in a forked child."""
        if self._gate.is_inherited:
            return
        shut(self._gate, self.loop, self.connector, self.sessions, self.answers)
        self._finalizer.detach()
        self.loop.runner.close()

    def __enter__(self) -> Engine:
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
        """Queue one prompt of token ids; never waits. Raises as `generate`.

        spliced: the chain of its first blocks, where these hold reused KV, and that chain's lineage.
        listener: is told of what it says; without one, `stream` hands that out.
        """
        return self.submit_all([(token_ids, params)], tenant, cache_salt, priority, spliced, listener)[0]

    def submit_all(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: tuple[Sequence[BlockId], Lineage] | None = None,
        listener: Listener | None = None,
    ) -> list[Handle]:
        """`submit`, for prompts that are in the same step if there is room. Queues none when one of them is wrong."""
        self.check_open()
        check_owner(tenant, cache_salt, priority)
        chain, lineage = spliced or ((), Lineage(self.connector.lineage_root(tenant, cache_salt)))
        added: list[tuple[Handle, list[Request]]] = []
        longest = [self._checked(token_ids, params) for token_ids, params in prompts]
        for (token_ids, params), most in zip(prompts, longest, strict=True):
            first = Request(
                request_id=f"request-{next(self._counter)}",
                prompt_token_ids=token_ids,
                params=params,
                max_output_tokens=most,
                lineage=lineage,
                block_size=self._config.block_size,
                seed=self._random.getrandbits(63) if params.seed is None else params.seed,
                eos_token_ids=self._eos_token_ids,
                call_token_ids=self._call_token_ids,
                priority=priority,
                arrival_s=time.monotonic(),
                tenant=tenant,
                chain=list(chain),
            )
            first.children = [first.sibling(index) for index in range(1, params.n)]
            handle = new_handle(first.request_id, token_ids, params, listener or Bell())
            added.append((handle, [first, *first.children]))
        self.loop.inbox.put(self.loop.add, added)
        return [handle for handle, _ in added]

    def _checked(self, token_ids: list[int], params: SamplingParams) -> int:
        """How many tokens may answer it."""
        check_params(params)
        check_ids(token_ids, self.vocab_size)
        check_ids_of(params, self.vocab_size)
        return self.max_output_tokens(token_ids, params)

    def abort(self, handle: Handle, index: int | None = None, reason: str = "abort") -> None:
        """End a request, or only choice `index` of it; its blocks have been given back on return.

        reason: "stop" where the caller has found its end. Does nothing when it is done, or when the engine is closed.
        """
        if handle.done:
            return
        with suppress(EngineClosedError):  # which ends it
            ended = self.loop.inbox.put(self.loop.abort, handle, index, reason)
            if not self.loop.is_here:  # the collector may close a stream in any thread
                ended.result()

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """Pieces of a submitted request as they come; leaving the loop early aborts it."""
        return stream(self, handle)

    def max_output_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Tokens this prompt may be answered with. Raises ContextLengthError with both numbers when it cannot fit."""
        return check_fits(len(token_ids), params, self.max_model_len, self._num_blocks * self._config.block_size)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and answer of one request together: the window, or the HBM pool where that is smaller."""
        return min(self.max_model_len, self._num_blocks * self._config.block_size)

    @property
    def closed(self) -> bool:
        return self.loop.inbox.closed

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def check_integrity(self) -> None:
        """Assert that every count agrees, and that nothing is held when nothing runs. For tests and debugging."""
        self.loop.call(self.loop.check_integrity)

    def check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("the engine is closed")

    # -- what chat sessions and administration need ------------------------------------------------------------------
    def root(self, tenant: str) -> BlockId:
        """Root of this tenant's chains."""
        return self.connector.lineage_root(tenant, "")

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str = "",
    ) -> tuple[list[BlockId], Lineage] | None:
        """A chain out of spans [begin, end) of tokens of this one, its KV reused; None where that is not stored."""
        return self.connector.splice(chain, token_ids, lineage, spans, tenant)

    def expire_kv(self, chain: Sequence[BlockId], at_s: float | None) -> None:
        """From this time on (seconds since the epoch) the KV of this chain goes before that of others."""
        with suppress(EngineClosedError):
            self.loop.call(self.connector.expire, chain, at_s)

    def pin_kv(self, chain: Sequence[BlockId], seconds: float) -> None:
        """For so long the KV of this chain stays longer than that of others."""
        self.loop.call(self.connector.pin, chain, seconds)

    def forget_hbm(self, block_ids: Iterable[BlockId]) -> None:
        """Forget these blocks in HBM, and overwrite them."""
        self.loop.call(self.loop.erasure.forget, tuple(block_ids))

    def evict_hbm(self, what: Evict, block_ids: frozenset[BlockId]) -> int:
        """Give up what matches in HBM, and these blocks, unless they are in use. Returns how many."""
        return self.loop.call(self.loop.erasure.evict, what, block_ids)

    @property
    def vocab_size(self) -> int:
        """Of the model; a tokenizer's may be smaller."""
        return self.spec.vocab_size

    @property
    def fingerprint(self) -> bytes:
        """Names weights and layout where sessions outlive the process, else empty."""
        return self.connector.fingerprint

    @property
    def block_size(self) -> int:
        return self._config.block_size

    @property
    def block_bytes(self) -> int:
        return self._config.block_size * self.spec.kv_bytes_per_token
