"""The core in this process: the loop that steps, the model and the tiers, put together. Token ids in and out.

Any thread may call it, and waits for `kvstore.engine.core.step_loop`, the only one that steps.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Evict, Evicted
from kvstore.connector import KVConnector, open_connector
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.weights import weights_digest
from kvstore.engine.config import EngineConfig
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.output_processor import Handle, Listener, OutputProcessor, new_handle
from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduler
from kvstore.engine.core.step_loop import StepLoop
from kvstore.engine.lifetime import Closing
from kvstore.engine.model.fingerprint import fingerprint
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.loading import Loaded, load
from kvstore.engine.model.memory import num_hbm_blocks
from kvstore.engine.model.probe import intercept
from kvstore.engine.model.step.graphs import CudaCapturer
from kvstore.engine.model.step.runner import ModelRunner
from kvstore.engine.model.step.waiting import WAITING
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.core import Bell, Facts, checked_request
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.detokenizer import ChoiceText
from kvstore.engine.text.prompts import check_owner
from kvstore.errors import EngineClosedError
from kvstore.kernels.cpu.threads import let_helpers_go
from kvstore.kernels.cuda.triton_support import has_triton
from kvstore.memory.layout import KVLayout


class LocalCore:
    """A `Core`. tokenizer: of the model, None where it has none. life: it has one.

    directory: a share of the store for the tiers, closed with it, also when this raises.
    """

    life = 0

    def __init__(self, config: EngineConfig, directory: StoreDirectory | None) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._counter = itertools.count()
        with ExitStack() as opened:
            with WAITING.allowed():
                self._build(config, directory, opened)
            opened.callback(self.loop.stop)
            let_helpers_go()  # from now on the loop's thread computes
            self.loop.start()
            self._closing = Closing(opened.pop_all())

    def _build(self, config: EngineConfig, directory: StoreDirectory | None, opened: ExitStack) -> None:
        def check(network: Any, tokenizer: Any) -> None:
            check_room(config, network)
            if config.chat_template is not None and (template := ChatTemplate.of(tokenizer)) is not None:
                template.check()

        with ExitStack() as held:  # until the tiers have it: they keep it while a write is stuck
            if directory is not None:
                held.callback(directory.close)
            loaded = load(
                config.model, config.device, config.dtype, config.max_model_len, config.tokenizer, config.revision,
                config.chat_template, check,
            )  # fmt: skip
            self.tokenizer = loaded.tokenizer
            self._eos_token_ids = loaded.eos_token_ids
            self._call_token_ids = loaded.call_token_ids
            model = intercept(loaded.model, loaded.max_model_len, pack=True)
            limits = config.scheduler(loaded.max_model_len)
            has_graphs = loaded.device.type == "cuda" and has_triton() and not config.enforce_eager
            has_store = bool(config.tiers.cpu or config.tiers.disk)
            num_blocks = num_hbm_blocks(model, limits, config.tiers.hbm, has_graphs, has_store)
            held.pop_all()
        with torch.cuda.device_of(next(loaded.model.parameters())):  # whose context pins the arena
            self.connector = open_store(config, loaded, model, num_blocks, directory)
        opened.callback(self.connector.close)
        pool = BlockPool(num_blocks, self.connector.hbm_order)
        capturer = CudaCapturer(loaded.device) if has_graphs else None
        runner = ModelRunner(model, limits, num_blocks, self.connector, capturer)
        backend = None if loaded.tokenizer is None else loaded.tokenizer.backend_tokenizer
        self.loop = StepLoop(
            Scheduler(limits, KVCacheManager(pool, limits.block_size), self.connector),
            runner,
            OutputProcessor(partial(ChoiceText, tokenizer=backend)),
            runs_ahead=loaded.device.type == "cuda",
        )
        self.facts = Facts(
            loaded.name, loaded.max_model_len, min(loaded.max_model_len, num_blocks * config.block_size),
            config.block_size, config.block_size * model.spec.kv_bytes_per_token, model.spec.vocab_size,
            self.connector.fingerprint, loaded.sampling_defaults,
        )  # fmt: skip

    def close(self) -> None:
        """Let a running step end, refuse further ones, and drain the store. Does nothing in a forked child."""
        self._closing.close()
        if self._closing.closed:
            self.loop.runner.close()

    @property
    def closed(self) -> bool:
        return self.loop.inbox.closed

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("the engine is closed")

    # -- requests ----------------------------------------------------------------------------------------------------
    def submit_all(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: tuple[Sequence[BlockId], Lineage] | None = None,
        listener: Listener | None = None,
    ) -> list[Handle]:
        self.check_open()
        check_owner(tenant, cache_salt, priority)
        chain, lineage = spliced or ((), Lineage(self.connector.lineage_root(tenant, cache_salt)))
        added: list[tuple[Handle, list[Request]]] = []
        longest = [checked_request(token_ids, params, self.facts) for token_ids, params in prompts]
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

    def abort(self, handle: Handle) -> None:
        if handle.done:
            return
        with suppress(EngineClosedError):  # which ends it
            ended = self.loop.inbox.put(self.loop.abort, handle)
            if not self.loop.is_here:  # the collector may close a stream in any thread
                ended.result()

    # -- the KV of conversations -------------------------------------------------------------------------------------
    def root(self, tenant: str) -> BlockId:
        return self.connector.lineage_root(tenant, "")

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
    ) -> tuple[list[BlockId], Lineage] | None:
        return self.connector.splice(chain, token_ids, lineage, spans, tenant)

    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        self.connector.prefetch(chain, token_ids, lineage, tenant)

    def pin(self, chain: Sequence[BlockId], seconds: float) -> None:
        self.loop.call(self.connector.pin, chain, seconds)

    def expire(self, chain: Sequence[BlockId], at_s: float | None) -> None:
        with suppress(EngineClosedError):
            self.loop.call(self.connector.pin, chain, None, math.inf if at_s is None else at_s)

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float) -> bool:
        self.loop.call(self.loop.erasure.forget, tuple(block_ids))
        found, is_gone = self.connector.upkeep.forget(block_ids, timeout_s)
        self.loop.call(self.loop.erasure.forget, tuple(found))
        return is_gone

    # -- the store ---------------------------------------------------------------------------------------------------
    def evict(self, what: Evict) -> dict[str, Evicted]:
        below, block_ids = self.connector.upkeep.evict(what)
        num_blocks = self.loop.call(self.loop.erasure.evict, what, block_ids)
        return {"hbm": Evicted(num_blocks, num_blocks * self.facts.block_bytes), **below}

    def verify(self, delete: bool) -> dict[str, object]:
        return self.connector.upkeep.verify(delete)

    def compact(self) -> dict[str, object]:
        return self.connector.upkeep.compact()

    def flush(self) -> None:
        self.check_open()
        self.connector.upkeep.flush()

    def stats(self) -> dict[str, object]:
        shape = {"block_bytes": self.facts.block_bytes, "block_size": self.facts.block_size}
        return self.loop.call(self.loop.stats, {**shape, "is_auto": self._config.tiers.hbm == "auto"})


# -- the tiers below HBM -----------------------------------------------------------------------------------------------
def check_room(config: EngineConfig, network: Any) -> None:
    """Before weights are read: whether the tiers have room for blocks, as far as the model's configuration tells.

    Raises ConfigError.
    """
    text = network.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or (num_heads and text.hidden_size // num_heads)
    dtype = getattr(text, "dtype", None) if config.dtype == "auto" else getattr(torch, config.dtype)
    if num_kv_heads and head_dim:
        itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 2
        layer_bytes = 2 * config.block_size * num_kv_heads * head_dim * itemsize
        config.tiers.check_room(text.num_hidden_layers * layer_bytes)


def open_store(
    config: EngineConfig, loaded: Loaded, model: PositionFreeModel, num_blocks: int, directory: StoreDirectory | None
) -> KVConnector:
    """The connector for `config.tiers`. num_blocks: of the engine's pool. directory: see `open_connector`.

    Raises ConfigError, ModelError, StoreError or StoreLockedError.
    """
    spec = model.spec

    def named(cache: Path | None) -> str:
        """Weights need a name only where their KV outlives the process."""
        return fingerprint(model, "" if cache is None else weights_digest(loaded.source, cache), config.block_size)

    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.block_size, spec.dtype, model.rotations)
    # Staging without a CPU tier: the longest request's loads, and for every running one a block that is being filled.
    least_slots = 2 * config.max_num_seqs + -(-loaded.max_model_len // config.block_size)
    name, device, load = loaded.name, loaded.device, config.load
    return open_connector(
        config.tiers, layout, name, named, device, load, least_slots, num_blocks, config.eviction, directory
    )
