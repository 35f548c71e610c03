"""The engine: prompts in, tokens out, one step at a time. Ties scheduler, model runner, outputs and sessions together.

Any thread may call it; whoever waits for an answer drives the steps, under one lock.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from engine.chat import ChatSession
from engine.chat_template import ChatTemplate
from engine.config import EngineConfig
from engine.kv_cache_manager import KVCacheManager
from engine.loading import load
from engine.memory import num_hbm_blocks
from engine.model_runner import ModelRunner
from engine.output_processor import Handle, OutputProcessor
from engine.outputs import Piece, RequestOutput
from engine.probe import intercept
from engine.prompts import check_fits, check_session_id, checked_prompts, prompt_ids
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, SchedulerOutput
from kvstore.block import extend_chain
from kvstore.config import CacheTiers
from kvstore.connector import NullConnector
from kvstore.errors import EngineClosedError, RequestError
from kvstore.pool import BlockPool


class Engine:
    """A language model with a paged, prefix-cached KV pool.

    model: None for the built-in chat model, a local Hugging Face directory, or a hub id.
    cache_tiers: CacheTiers or a dict of hbm, cpu, disk, path. hbm "auto" sizes the pool by what is free. The tiers cpu
        and disk are accepted and checked, and not yet active: KV lives in HBM only, sessions in memory only.
    device, dtype: "auto" picks CUDA where there is one, and the dtype of the checkpoint.
    block_size: tokens per block. max_model_len: the window, at most the model's own.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step, of all requests together.
    load: "auto" or "always", for tiers below HBM (see cache_tiers). seed: of sampling without a seed of its own.
    policy: "fcfs" or "priority" (lower values first).

    Raises ConfigError, ModelError or UnsupportedModelError. A context manager; `close` twice does no harm.
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
    ) -> None:
        tiers = CacheTiers.of(cache_tiers)
        config = EngineConfig(
            model, tiers, device, dtype, block_size, max_model_len, max_num_seqs, max_num_batched_tokens, load, seed,
            policy,
        )  # fmt: skip
        self._build(config)

    def _build(self, config: EngineConfig) -> None:
        loaded = load(config.model, config.device, config.dtype, config.max_model_len)
        self.model_name = loaded.name
        self.max_model_len = loaded.max_model_len
        self.tokenizer = loaded.tokenizer
        self._config = config
        self._eos_token_ids = loaded.eos_token_ids
        model = intercept(loaded.model, loaded.max_model_len, pack=loaded.device.type == "cpu")
        self.spec = model.spec
        limits = config.scheduler(loaded.max_model_len)
        self._num_blocks = num_hbm_blocks(model, limits, config.tiers.hbm)
        self._connector = NullConnector()
        self._pool = BlockPool(self._num_blocks)
        self._scheduler = Scheduler(limits, KVCacheManager(self._pool, limits.block_size), self._connector)
        self._runner = ModelRunner(model, limits, self._num_blocks, self._connector)
        self._outputs = OutputProcessor(None if loaded.tokenizer is None else loaded.tokenizer.backend_tokenizer)
        self._template = None if loaded.tokenizer is None else ChatTemplate.of(loaded.tokenizer)
        self._sessions: dict[tuple[str, str], ChatSession] = {}
        self._random = random.Random(config.seed)
        self._counter = itertools.count()
        self._totals = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "completion_tokens"), 0)
        self._lock = threading.RLock()
        self._closed = False
        self._at_exit = _close_at_exit(self)

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
        texts, each = checked_prompts(prompts, params)
        ids = [prompt_ids(prompt, self.tokenizer, self.spec.vocab_size) for prompt in texts]
        for token_ids, one in zip(ids, each, strict=True):
            self.max_output_tokens(token_ids, one)
        handles: list[Handle] = []
        try:
            for token_ids, one in zip(ids, each, strict=True):
                handles.append(self.submit(token_ids, one, tenant, cache_salt, priority))
            for handle in handles:
                self._wait(handle)
        finally:
            for handle in handles:
                self.abort(handle)
        return [handle.output for handle in handles]

    def chat(self, session_id: str, tenant: str = "", system: str | None = None) -> ChatSession:
        """The session of this id, created when unknown. system: its system prompt, for a new session only.

        Raises RequestError for a bad id or a model without a chat template.
        """
        check_session_id(session_id)
        if self._template is None:
            raise RequestError(f"{self.model_name} has no chat template; use generate", param="messages")
        with self._lock:
            self._check_open()
            key = (tenant, session_id)
            if key not in self._sessions:
                self._sessions[key] = ChatSession(self, self._template, session_id, tenant, system)
            return self._sessions[key]

    def prefetch(self, session_id: str, tenant: str = "") -> None:
        """A hint that this session's person is typing. Raises RequestError when there is no such session."""
        session = self._sessions.get((tenant, session_id))
        if session is None:
            raise RequestError(f"there is no session {session_id!r}", param="session_id")
        chain: list[bytes] = []
        extend_chain(chain, self._connector.lineage_root(tenant, ""), session.token_ids, self._config.block_size)
        self._connector.prefetch(chain)

    def flush(self) -> None:
        """Returns when every finished block is synced on disk; at once while no disk tier is active."""
        self._connector.flush()

    def stats(self) -> dict[str, object]:
        """Counters and gauges as a plain dict; step times are running totals in seconds."""
        with self._lock:
            pool = self._pool
            return {
                "model": self.model_name,
                "requests": {
                    "running": self._scheduler.num_running,
                    "waiting": self._scheduler.num_waiting,
                    "finished": self._totals["requests"],
                    "preemptions": self._scheduler.num_preemptions,
                },
                "tokens": {name: self._totals[name] for name in self._totals if name != "requests"},
                "hbm": {
                    "blocks": pool.num_blocks,
                    "free_blocks": pool.num_free,
                    "cached_blocks": pool.num_cached,
                    "evicted_blocks": pool.num_evictions,
                    "block_bytes": self._config.block_size * self.spec.kv_bytes_per_token,
                },
                "step": asdict(self._runner.times),
                **self._connector.stats(),
            }

    def close(self) -> None:
        """End running requests as aborted and close the store."""
        with self._lock:
            if self._closed:
                return
            self._abort_all(None)
            self._closed = True
            self._at_exit()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests, step by step --------------------------------------------------------------------------------------
    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Handle:
        """Queue one prompt, given as checked token ids. Somebody has to call `step` until the handle is done."""
        longest = self.max_output_tokens(token_ids, params)
        with self._lock:
            self._check_open()
            seed = self._random.getrandbits(63) if params.seed is None else params.seed
            root = self._connector.lineage_root(tenant, cache_salt)
            name = f"request-{next(self._counter)}"
            first = Request(
                request_id=name,
                prompt_token_ids=token_ids,
                params=params,
                max_output_tokens=longest,
                root=root,
                block_size=self._config.block_size,
                seed=seed,
                eos_token_ids=self._eos_token_ids,
                priority=priority,
                arrival_s=time.monotonic(),
            )
            first.children = [first.sibling(index) for index in range(1, params.n)]
            choices = [first, *first.children]
            self._scheduler.add(choices[0])
            return self._outputs.add(choices)

    def step(self) -> list[Handle]:
        """Run one step; returns the handles that got something new. An error ends all running requests with it."""
        with self._lock:
            self._check_open()
            try:
                started = time.perf_counter()
                output = self._scheduler.schedule()
                scheduled = time.perf_counter()
                result = self._runner.execute(output)
                executed = time.perf_counter()
                touched = self._update(output, result.token_ids, result.logprobs)
            except Exception as error:
                self._abort_all(error)
                raise
            times = self._runner.times
            times.schedule_s += scheduled - started
            times.update_s += time.perf_counter() - executed
            return touched

    def _update(self, output: SchedulerOutput, token_ids: list[Sequence[int]], logprobs: dict) -> list[Handle]:
        by_id = {s.request_id: logprobs[i] for i, s in enumerate(output.scheduled) if i in logprobs} if logprobs else {}
        touched: dict[str, Handle] = {}
        for progress in self._scheduler.update(output, token_ids):
            request = progress.request
            parent_id = request.request_id.rsplit("-", 1)[0] if request.index else request.request_id
            rows = by_id.get(request.request_id) or by_id.get(parent_id) or ()
            own = rows[request.index : request.index + 1] if len(rows) > 1 else rows
            handle, stopped = self._outputs.process(request, progress.token_ids, own)
            if stopped:
                self._scheduler.finish(request.request_id, "stop", request.stop_reason)
            if handle is not None:
                touched[handle.request_id] = handle
                if handle.done:
                    self._count(handle)
        return list(touched.values())

    def abort(self, handle: Handle) -> None:
        """End a request now; its blocks are given back before the next step. Does nothing when it is done."""
        if handle.done:
            return
        with self._lock:
            for request_id in self._outputs.abort(handle):
                self._scheduler.finish(request_id, "abort")

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """Pieces of a submitted request as they come; leaving the loop early aborts it."""
        try:
            while not handle.done or handle.pieces:
                if handle.pieces:
                    yield handle.pieces.popleft()
                else:
                    self._step_for(handle)
            self._raise_error(handle)
        finally:
            self.abort(handle)

    def max_output_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Tokens this prompt may be answered with. Raises ContextLengthError with both numbers when it cannot fit."""
        return check_fits(len(token_ids), params, self.max_model_len, self._num_blocks * self._config.block_size)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def check_integrity(self) -> None:
        """Assert that every count agrees, and that nothing is held when nothing runs. For tests and debugging."""
        with self._lock:
            self._scheduler.check_integrity()

    def _wait(self, handle: Handle) -> None:
        while not handle.done:
            self._step_for(handle)
        self._raise_error(handle)

    def _step_for(self, handle: Handle) -> None:
        """A step, unless another thread's step has just brought the end."""
        with self._lock:
            if not handle.done:
                self.step()

    @staticmethod
    def _raise_error(handle: Handle) -> None:
        if handle.error is not None:
            raise handle.error

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def _abort_all(self, error: Exception | None) -> None:
        for handle in self._outputs.handles():
            for request_id in self._outputs.abort(handle, error):
                self._scheduler.finish(request_id, "abort")

    def _count(self, handle: Handle) -> None:
        usage = handle.output.usage
        self._totals["requests"] += 1
        self._totals["prompt_tokens"] += usage.prompt_tokens
        self._totals["cached_tokens"] += usage.cached_tokens
        self._totals["completion_tokens"] += usage.completion_tokens


def _close_at_exit(engine: Engine) -> weakref.finalize:
    """Drain the store at interpreter exit, or when the engine is collected, whichever comes first."""
    return weakref.finalize(engine, engine._connector.close)
