"""The engine: prompts in, tokens out, one step at a time. Ties scheduler, model runner, outputs and sessions together.

Any thread may call it; whoever waits for an answer drives the steps, under one lock.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from engine.admin import Admin, weak_handler
from engine.blocking import generate, stream
from engine.chat import ChatSession
from engine.chat_template import ChatTemplate
from engine.chats import open_chat, prefetch_chat
from engine.config import EngineConfig
from engine.erasure import Erasure
from engine.fair_lock import FairLock
from engine.graphs import CudaCapturer
from engine.kv_cache_manager import KVCacheManager
from engine.lifetime import Gate, shut, shut_dropped
from engine.loading import load
from engine.memory import num_hbm_blocks
from engine.model_runner import ModelRunner, StepResult, StepTimes
from engine.output_processor import Handle, OutputProcessor, Totals
from engine.outputs import Piece, RequestOutput
from engine.probe import intercept
from engine.prompts import check_fits, check_ids, check_ids_of, check_owner, check_params
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, SchedulerOutput
from engine.stats import engine_stats
from engine.storage import check_room, open_store
from engine.waiting import WAITING
from kernels.triton_support import has_triton
from kvstore.block import BlockId, Lineage
from kvstore.config import CacheTiers
from kvstore.connector import StoreDirectory, TransferPlan, hold_store
from kvstore.errors import EngineClosedError, KVStoreError
from kvstore.pool import BlockPool
from kvstore.session_store import AnswerStore, SessionKey, SessionStore, open_answers, open_sessions

IDLE_WAIT_S = 0.02


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
        with WAITING.allowed(), ExitStack() as failing:
            directory = hold_store(tiers)  # first: a store that cannot be had is found before weights are read
            if directory is not None:
                failing.callback(directory.close)
            self._build(config, directory)
            failing.pop_all()

    def _build(self, config: EngineConfig, directory: StoreDirectory | None) -> None:
        loaded = load(
            config.model, config.device, config.dtype, config.max_model_len, config.tokenizer, config.revision,
            config.chat_template, partial(check_room, config),
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
        self.lock = FairLock()
        with torch.cuda.device_of(next(loaded.model.parameters())):  # whose context pins the arena
            self.connector = open_store(config, loaded, model, self._num_blocks, directory)
        self._gate = Gate()
        try:
            self.pool = BlockPool(self._num_blocks, self.connector.hbm_order)
            self._scheduler = Scheduler(limits, KVCacheManager(self.pool, limits.block_size), self.connector)
            capturer = CudaCapturer(loaded.device) if has_graphs else None
            self._runner = ModelRunner(model, limits, self._num_blocks, self.connector, capturer)
            self._outputs = OutputProcessor(None if loaded.tokenizer is None else loaded.tokenizer.backend_tokenizer)
            self._template = None if loaded.tokenizer is None else ChatTemplate.of(loaded.tokenizer)
            self.sessions: SessionStore = open_sessions(self.connector.directory)
            self.answers: AnswerStore = open_answers(self.connector.directory)
        except BaseException:
            self.connector.close()
            raise
        self.chats: weakref.WeakValueDictionary[SessionKey, ChatSession] = weakref.WeakValueDictionary()
        self._erasure = Erasure(self.pool, self._runner.caches)
        self._random = random.Random(config.seed)
        self._counter = itertools.count()
        self._num_aborted = 0
        self._plan: TransferPlan | None = None
        self._totals = Totals()
        self._changed = threading.Condition(self.lock)  # type: ignore[arg-type]  # work has come, or a step has ended
        self._driver: threading.Thread | None = None  # who steps, when it is not the caller who waits
        self._aborted: list[Handle] = []  # since the last step, for the driver to hand out
        # Also when the engine is collected or the interpreter exits: no step may run while Python is torn down.
        parts = (self._gate, self.lock, self.connector, self.sessions, self.answers)
        self._finalizer = weakref.finalize(self, shut_dropped, *parts)
        self.admin = Admin(self)
        try:
            self.admin.resume()
            self.connector.serve(weak_handler(self.admin))
        except BaseException:
            self._finalizer.detach()
            shut(*parts)
            raise

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
        with self.lock:
            is_auto = self._config.tiers.hbm == "auto"
            stats = engine_stats(self, self._scheduler, self._totals, self._num_aborted, is_auto)
        stats["sessions"] = self.sessions.stats()
        return stats

    def close(self) -> None:
        """End running requests as aborted and close the store. Does nothing in a forked child."""
        if self._gate.is_inherited:
            return
        with self.lock:
            if self._gate.closed:
                return
            self._end_all(None)
            self._finalizer.detach()
            shut(self._gate, self.lock, self.connector, self.sessions, self.answers)
            self._runner.caches.clear()
            self._changed.notify_all()

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
        spliced: tuple[Sequence[BlockId], Lineage] | None = None,
        announce: Callable[[Handle], None] | None = None,
    ) -> Handle:
        """Queue one prompt of token ids. Somebody has to call `step` until the handle is done. Raises as `generate`.

        spliced: the chain of its first blocks, where these hold reused KV, and that chain's lineage.
        announce: called with the handle before any step can see it.
        """
        check_owner(tenant, cache_salt, priority)
        check_params(params)
        check_ids(token_ids, self.vocab_size)
        check_ids_of(params, self.vocab_size)
        longest = self.max_output_tokens(token_ids, params)
        with self.lock:
            self.check_open()
            with self._ending_all_on_error():
                chain, lineage = spliced or ((), Lineage(self.connector.lineage_root(tenant, cache_salt)))
                first = Request(
                    request_id=f"request-{next(self._counter)}",
                    prompt_token_ids=token_ids,
                    params=params,
                    max_output_tokens=longest,
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
                handle = self._outputs.add([first, *first.children])
                if announce is not None:
                    announce(handle)
                self._scheduler.add(first)
            self._changed.notify_all()
            return handle

    def step(self) -> list[Handle]:
        """Run one step; returns the handles that got something new or were aborted. An error ends all that run."""
        with self.lock:
            self.check_open()
            aborted, self._aborted = self._aborted, []
            if aborted and not self._scheduler.has_work:
                return aborted
            with self._ending_all_on_error(), WAITING.allowed():
                started = time.perf_counter()
                self._plan = None
                output = self._scheduler.schedule()
                self._plan = output.plan
                scheduled = time.perf_counter()
                result = self._runner.execute(output)
                executed = time.perf_counter()
                touched = self._update(output, result)
                self._erasure.go_on()
            times = self._runner.times
            times.schedule_s += scheduled - started
            times.update_s += time.perf_counter() - executed
            self._changed.notify_all()
            if not output.scheduled and self._scheduler.has_work:
                self.connector.wait_for_progress(IDLE_WAIT_S)  # every request waits for blocks from a slower tier
            return touched + aborted

    def _update(self, output: SchedulerOutput, result: StepResult) -> list[Handle]:
        failed_blocks = self.connector.get_finished()
        touched: dict[str, Handle] = {}
        for progress in self._scheduler.update(output, result.token_ids, failed_blocks):
            request = progress.request
            logprobs = result.logprobs.get(progress.scheduled)
            logprob = None if logprobs is None else logprobs[progress.sample]
            handle, stopped = self._outputs.process(request, progress.token_id, logprob)
            if stopped:
                self._scheduler.finish(request.request_id, "stop", request.stop_reason)
            if handle is not None:
                touched[handle.request_id] = handle
                if handle.done:
                    self._totals.add(handle.output.usage)
        return list(touched.values())

    def abort(self, handle: Handle, index: int | None = None, reason: str = "abort") -> None:
        """End a request, or only choice `index` of it; its blocks are given back before the next step.

        reason: "stop" where the caller has found its end. Does nothing when it is done.
        """
        if handle.done:
            return
        with self.lock, self._ending_all_on_error():
            ended = self._outputs.abort(handle, None, index, reason)
            if reason == "abort":
                self._num_aborted += bool(ended)
            elif not self._outputs.is_running(handle):
                self._totals.add(handle.output.usage)
            self._aborted += [handle] if self._driver is not None else []
            for request_id in ended:
                self._scheduler.finish(request_id, reason)
            self._erasure.go_on()
            self._changed.notify_all()  # whoever waits for it while another thread steps

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
        return self._gate.closed

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._aborted)

    def check_integrity(self) -> None:
        """Assert that every count agrees, and that nothing is held when nothing runs. For tests and debugging."""
        with self.lock:
            self._scheduler.check_integrity()
            self.connector.check_integrity(idle=not self._scheduler.has_work)

    def step_for(self, handle: Handle) -> None:
        """A step, unless another thread's step has just brought the end, or a driver steps for all."""
        with self._changed:
            if handle.done:
                return
            if self._driver in (None, threading.current_thread()):
                self.step()
            else:
                self._changed.wait()

    def drive(self, driver: threading.Thread) -> None:
        """From now on only this thread steps; whoever else waits for an answer waits for it."""
        with self.lock:
            self._driver = driver

    def warm_up(self) -> None:
        """By the driver, before its first step: on CUDA a thread's first step would take longer."""
        with self.lock, WAITING.allowed():
            if not self._gate.closed:
                self._runner.warm_up()

    def wait_for_work(self, stop: Callable[[], bool]) -> None:
        """Returns when there is something to step for, or when `stop` says so after a `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_work or stop())

    def wake(self) -> None:
        """Let `wait_for_work` ask its `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def check_open(self) -> None:
        if self._gate.closed:
            raise EngineClosedError("the engine is closed")

    @contextmanager
    def _ending_all_on_error(self) -> Iterator[None]:
        """An error, or Ctrl-C, in here may have torn any count: every request ends and all state begins anew."""
        try:
            yield
        except Exception as error:
            self._end_all(error)
            raise
        except BaseException:
            self._end_all(KVStoreError("another caller was interrupted in the middle of a step"))
            raise

    def _end_all(self, error: Exception | None) -> None:
        ended = self._outputs.handles()
        for handle in ended:
            self._outputs.abort(handle, error)
            self._num_aborted += 1
        self._aborted += ended if self._driver is not None else []
        self.connector.step_failed(self._plan)
        self._plan = None
        self._scheduler.reset("abort")
        self._runner.reset()
        self._changed.notify_all()

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
        with self.lock:
            self.connector.expire(chain, at_s)

    @property
    def vocab_size(self) -> int:
        """Of the model; a tokenizer's may be smaller."""
        return self.spec.vocab_size

    @property
    def computes_on_cpu(self) -> bool:
        return self._runner.model.device.type == "cpu"

    @property
    def fingerprint(self) -> bytes:
        """Names weights and layout where sessions outlive the process, else empty."""
        return self.connector.fingerprint

    @property
    def step_times(self) -> StepTimes:
        return self._runner.times

    @property
    def block_size(self) -> int:
        return self._config.block_size

    @property
    def block_bytes(self) -> int:
        return self._config.block_size * self.spec.kv_bytes_per_token

    def forget_hbm(self, blocks: Iterable[int]) -> None:
        """Forget these blocks and overwrite them."""
        self._erasure.forget(blocks)
