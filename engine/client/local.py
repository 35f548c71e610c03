"""The core in this process: assembles the loop that steps, the model and the tiers. Token ids in and out.

Any thread may call it, and then waits for `kvstore.engine.core.step_loop`. Only the thread of that loop steps.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from kvstore.blocks.holdings import Place
from kvstore.blocks.ids import BlockId, with_quantised
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Evict, Evicted
from kvstore.connector import KVConnector, NullConnector
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.opening import OpeningDisk
from kvstore.disk.weights import weights_digest
from kvstore.engine.client import messages
from kvstore.engine.client.messages import Call, State, Submit
from kvstore.engine.config import EngineConfig, SchedulerConfig, default_topic
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.request import Request, Update
from kvstore.engine.core.scheduler import Scheduler
from kvstore.engine.core.state_slots import StateSlots
from kvstore.engine.core.step_loop import StepLoop
from kvstore.engine.core.window_slots import WindowSlots
from kvstore.engine.model.devices import block_bytes_in_hbm, num_hbm_blocks, own_device
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.loading import Loaded, fingerprint, load
from kvstore.engine.model.parallel.group import Part, part_of_process
from kvstore.engine.model.probe import intercept
from kvstore.engine.model.states import keeps_states
from kvstore.engine.model.step.graphs import CudaCapturer
from kvstore.engine.model.step.runner import ModelRunner
from kvstore.engine.outputs import Facts
from kvstore.engine.process import Heart
from kvstore.engine.progress import KERNELS, PROBE, WEIGHTS, begin
from kvstore.engine.ranks.on_ray import others_on_ray
from kvstore.engine.ranks.ranks import Ranks, end_hung, started_here
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.compiler import GrammarCompiler
from kvstore.errors import ConfigError, EngineClosedError, EngineDiedError
from kvstore.kernels.cpu.threads import let_helpers_go
from kvstore.kernels.kv import has_triton
from kvstore.memory.ranked import OtherRanks
from kvstore.store.assembly import open_tiered

if TYPE_CHECKING:
    from kvstore.remote.kv_events import KVEvents

R = TypeVar("R")
LOGGER = logging.getLogger("kvstore.engine")


def open_model(
    config: EngineConfig, ranks: Ranks | None
) -> tuple[Loaded, PositionFreeModel, SchedulerConfig, int, bool]:
    """A model that is ready to run, its limits, the number of blocks in its HBM pool, and whether decode steps will be
    CUDA graphs.

    ranks: load the other parts meanwhile. Raises as `load` and `intercept`, and the errors of these ranks.
    """

    def check(network: Any, tokenizer: Any) -> None:
        check_room(config, network)
        template = None if config.chat_template is None else ChatTemplate.of(tokenizer)
        if template is not None and (fault := template.fault()) is not None:
            raise ConfigError("chat_template", f"one that cannot be used: {fault}", "give another one")

    device, part = own_device(config), None
    if ranks is not None:
        part = part_of_process(0, config.tensor_parallel_size, config.pipeline_parallel_size, device)
    begin(WEIGHTS)
    loaded = load(
        config.model, device, config.dtype, config.max_model_len, config.tokenizer, config.revision,
        config.chat_template, check, part,
    )  # fmt: skip
    limits = config.scheduler(loaded.max_model_len)
    has_graphs = loaded.device.type == "cuda" and not config.enforce_eager and ranks is None
    has_store = bool(config.tiers.cpu or config.tiers.disk)
    # Triton launches its kernels on the current device.
    on_device = torch.cuda.device_of(next(loaded.model.parameters()))
    with on_device, nullcontext() if ranks is None else ranks.blamed():
        has_graphs = has_graphs and has_triton()
        if ranks is not None and part is not None:
            ranks.wait_loaded()
            _join(part, ranks)
            for other in ranks.others:
                other.child.when_ended(part.cut)
        begin(PROBE)
        model = intercept(loaded.model, loaded.max_model_len, True, part)
        has_graphs = has_graphs and model.spec.state is None
        if model.spec.state is not None and config.state_dtype != "auto":
            state = replace(model.spec.state, stored_dtype=getattr(torch, config.state_dtype))
            model.spec = replace(model.spec, state=state)
        num_blocks, num_slots = num_hbm_blocks(
            model, limits, config.tiers.hbm, has_graphs, has_store, config.num_processes
        )
    if model.spec.windows:
        limits = replace(limits, num_window_slots=num_slots)
    elif num_slots:  # half of them for checkpoints
        most = min(limits.max_num_seqs, num_slots // 2)
        if most < limits.max_num_seqs:
            LOGGER.info("HBM has room for %d states, so %d requests run at once", num_slots, most)
        limits = replace(limits, max_num_seqs=most, num_state_slots=num_slots)
    num_checkpoint_blocks = model.layout(limits.block_size).checkpoint_blocks
    limits = replace(limits, checkpoint_tokens=num_checkpoint_blocks * limits.block_size)
    return loaded, model, limits, num_blocks, has_graphs


def _join(part: Part, ranks: Ranks) -> None:
    """Join the groups of all ranks. In a thread, as nothing ends its wait for one that has ended before it has joined.

    Raises EngineDiedError.
    """
    joined = Future[None]()

    def settle(error: Exception | None) -> None:
        with suppress(InvalidStateError):  # the first counts
            joined.set_result(None) if error is None else joined.set_exception(error)

    def join() -> None:
        try:
            part.join(ranks.rendezvous, ranks.host)
            settle(None)
        except Exception as error:
            settle(error)

    for other in ranks.others:
        other.child.when_ended(lambda: settle(EngineDiedError(ranks.loss)))
    threading.Thread(target=join, name="kvstore-join", daemon=True).start()
    joined.result()


def check_room(config: EngineConfig, network: Any) -> None:
    """Check before weights are read that the tiers have room for blocks, as far as the model's configuration tells.

    Raises ConfigError.
    """
    text = network.to_dict()
    num_heads, num_kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    num_kv_heads = num_kv_heads or num_heads
    head_dim = text.get("head_dim") or (num_heads and text["hidden_size"] // num_heads)
    dtype = network.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    differ = any(text.get(name) for name in ("per_layer_config", "v_head_dim", "num_kv_shared_layers"))
    if num_kv_heads and head_dim and not differ and not keeps_states(network):
        itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 2
        layer_bytes = 2 * config.block_size * num_kv_heads * head_dim * itemsize
        config.tiers.check_room(text["num_hidden_layers"] * layer_bytes)


def open_ranks(config: EngineConfig, silence_s: float) -> AbstractContextManager[Ranks]:
    """Start the other ranks. Raises ConfigError, also if there are too few devices, and
    EngineDiedError if one does not come. On one machine all ranks get the same number of threads.
    """
    own_device(config)  # there must be one, before anything is started
    size, device = config.num_ranks, config.device if config.distributed_executor == "here" else "cpu"
    arguments = [{**config.arguments(), "device": device}] * (size - 1)
    num_partners = config.tensor_parallel_size - 1
    if config.distributed_executor == "ray":
        return others_on_ray(arguments, silence_s, num_partners, torch.get_num_threads())
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    return started_here(arguments, silence_s, num_partners, {"OMP_NUM_THREADS": str(torch.get_num_threads())})


class LocalCore:
    """A `Core`, which is never restarted. tokenizer: the model's, None if it has none.

    directory: a share of the store for the tiers. It is closed with the core, also if opening the core fails.
    """

    life, pid, silent_s = 0, None, 0.0

    def __init__(self, config: EngineConfig, directory: StoreDirectory | None, heart: Heart, silence_s: float) -> None:
        """heart: of this process; the other ranks end when it stops. silence_s: another rank is killed after so long
        without a sign of life.
        """
        self._config = config
        self._ranks: Ranks | None = None
        self._random = random.Random(config.seed)
        with ExitStack() as opened:
            self._build(config, directory, opened, heart, silence_s)
            self.compiler.wait_for_table()  # it would stop the steps
            opened.callback(self.loop.stop)
            let_helpers_go()  # from now on, the loop's thread computes
            self.loop.start()
            self.loop.on_round, self.loop.on_rest = heart.begin, heart.rest
            self._opened = opened.pop_all()

    def _build(
        self, config: EngineConfig, directory: StoreDirectory | None, opened: ExitStack, heart: Heart, silence_s: float
    ) -> None:
        disk = None
        with ExitStack() as held:  # until the tiers own it; they keep it while a write is stuck
            if directory is not None:  # it is checked and read while the model is loaded
                tiers, reports = config.tiers, config.kv_events is not None
                disk = OpeningDisk(directory, int(tiers.disk), tiers.codec, tell=begin, with_records=reports)
                held.callback(disk.close)
            if config.num_ranks > 1:
                self._ranks = opened.enter_context(open_ranks(config, silence_s))
                heart.stuck = partial(end_hung, self._ranks.others)
            loaded, model, limits, num_blocks, has_graphs = open_model(config, self._ranks)
            self.tokenizer = loaded.tokenizer
            self._eos_token_ids = loaded.eos_token_ids
            self._events = open_events(config, loaded.name)
            held.pop_all()
        self.compiler = GrammarCompiler(loaded.tokenizer, loaded.eos_token_ids, model.spec.vocab_size)
        opened.callback(self.compiler.close)
        begin(KERNELS)
        if self._events is not None:
            opened.callback(self._events.close)
        with torch.cuda.device_of(next(loaded.model.parameters())):  # the arena is pinned in the context of this device
            self.connector = open_store(config, loaded, model, num_blocks, disk, self._ranks)
        opened.callback(self.connector.close)
        if self._ranks is not None:
            self._ranks.open_arena()
        holdings, losses = self.connector.holdings, self.connector.hbm_losses
        on_gone = list[Callable[[BlockId], None]]()
        on_gone += [] if holdings is None else [partial(holdings.gone, Place.HBM)]
        on_gone += [] if losses is None else [partial(losses.note, "evicted", "hbm")]
        states = StateSlots(limits.num_state_slots) if limits.num_state_slots else None
        on_gone += [] if states is None else [lambda block_id: states.forget((block_id,))]
        pool = BlockPool(num_blocks, self.connector.hbm_order, on_gone)
        capturer = CudaCapturer(loaded.device) if has_graphs else None
        windows, window_of = None, None
        if limits.num_window_slots:
            window_blocks = model.layout(limits.block_size).window_blocks
            windows = WindowSlots(limits.num_window_slots, num_blocks, window_blocks)
            window_of = windows.of
        runner = ModelRunner(model, limits, num_blocks, self.connector, capturer, self._ranks, window_of)
        manager = KVCacheManager(pool, limits.block_size, holdings, states, windows)
        self.loop = StepLoop(
            Scheduler(limits, manager, self.connector),
            runner,
            runs_ahead=loaded.device.type == "cuda" and self._ranks is None,  # other ranks do not know what was sampled
        )
        is_plain = states is None and windows is None and config.tiers.codec != "int8"  # copies are of whole chains
        self.facts = Facts(
            loaded.name, loaded.max_model_len, min(loaded.max_model_len, num_blocks * config.block_size),
            config.block_size, block_bytes_in_hbm(model, limits, num_blocks), model.spec.vocab_size,
            self.connector.fingerprint, self.connector.root_secret, loaded.sampling_defaults,
            limits.max_num_seqs, is_plain and bool(config.tiers.cpu), self.connector.compute_price,
        )  # fmt: skip
        if self._events is not None and holdings is not None:
            self._events.start(holdings)

    def close(self) -> None:
        """Let a running step end, refuse further ones, and drain the store."""
        self._opened.close()
        self.loop.runner.close()
        self.loop.on_news = lambda: None  # else only the collector would free this and its model

    @property
    def on_news(self) -> Callable[[], None]:
        return self.loop.on_news

    @on_news.setter
    def on_news(self, function: Callable[[], None]) -> None:
        self.loop.on_news = function

    @property
    def loss(self) -> str | None:
        """Which rank of the model has ended, and how. The core then accepts no more requests."""
        return None if self._ranks is None else self._ranks.loss

    @property
    def state(self) -> State:
        if self.loop.inbox.closed:
            return "closed"
        return "running" if self.loss is None else "failed"

    @property
    def is_reader(self) -> bool:
        return self.loop.is_here

    def check_open(self) -> None:
        if self.loop.inbox.closed:
            raise EngineClosedError("the engine is closed")
        if self._ranks is not None:
            self._ranks.check()

    # -- requests ----------------------------------------------------------------------------------------------------
    def submit(self, prompts: Sequence[Submit]) -> None:
        self.check_open()
        requests = [self._request(prompt) for prompt in prompts]
        self.loop.inbox.put(self.loop.add, requests)
        for first in requests:
            if first.params.structured_outputs is not None:
                self.compiler.prepare(first, self._admit)

    def _admit(self, first: Request, error: Exception | None) -> None:
        self.loop.inbox.put(self.loop.admit, first, error)

    def _request(self, prompt: Submit) -> Request:
        params = prompt.params
        first = Request(
            request_id=prompt.request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_output_tokens=prompt.max_tokens,
            lineage=prompt.lineage,
            block_size=self._config.block_size,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=self._eos_token_ids,
            priority=prompt.priority,
            arrival_s=time.monotonic(),
            tenant=prompt.tenant,
            chain=list(prompt.chain),
            turn_starts=prompt.turn_starts,
            shared_ends=prompt.shared_ends,
            num_had=prompt.num_had,
            had_s=prompt.had_s,
            name=prompt.conversation,
        )
        first.children = [first.sibling(index) for index in range(1, params.n)]
        return first

    def end(self, request_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        self.loop.inbox.put(self.loop.end, request_id, index, stop_string)

    def note_call(self, request_id: str, index: int) -> None:
        self.loop.inbox.put(self.loop.news.note_call, request_id, index)

    def take_news(self) -> list[Update]:
        return self.loop.news.take_updates()

    def read_here(self) -> bool:
        return False

    def fileno(self) -> int:
        raise AssertionError("its own thread takes the news")

    # -- verbs -------------------------------------------------------------------------------------------------------
    def call(self, verb: Call[R]) -> R:
        self.check_open()
        return cast(R, self._carried_out(verb))

    def _carried_out(self, verb: Call[Any]) -> object:
        connector, upkeep = self.connector, self.connector.upkeep
        match verb:
            case messages.Splice(chain, token_ids, lineage, spans, tenant, head):
                return connector.splice(chain, token_ids, lineage, spans, tenant, head)
            case messages.Prefetch(chain, token_ids, lineage, tenant):
                connector.prefetch(chain, token_ids, lineage, tenant)
                return None
            case messages.Pin(chain, seconds, expires_s, tenant):
                return self.loop.call(connector.pin, chain, seconds, expires_s, tenant)
            case messages.Unused(block_ids):
                return self.loop.call(self.loop.scheduler.roster.unused, block_ids)
            case messages.Forget(block_ids, timeout_s):
                return self._forget(block_ids, timeout_s)
            case messages.EvictBlocks(what):
                return self._evict(what)
            case messages.VerifyBlocks(delete):
                return upkeep.verify(delete)
            case messages.CompactBlocks(codec):
                return upkeep.compact(codec)
            case messages.Flush(chain, timeout_s):
                if chain:
                    return upkeep.share(chain, timeout_s)
                upkeep.flush()
                return 0
            case messages.ReadStats():
                return self._stats()
            case _:
                raise AssertionError(f"no verb: {verb}")

    def _forget(self, block_ids: Sequence[BlockId], timeout_s: float) -> bool:
        self.loop.call(self.loop.erasure.forget, tuple(with_quantised(block_ids)))
        found, is_gone = self.connector.upkeep.forget(block_ids, timeout_s)
        self.loop.call(self.loop.erasure.forget, tuple(found))
        return is_gone

    def _evict(self, what: Evict) -> dict[str, Evicted]:
        below, block_ids = self.connector.upkeep.evict(what)
        num_blocks = self.loop.call(self.loop.erasure.evict, what, block_ids)
        return {"hbm": Evicted(num_blocks, num_blocks * self.facts.block_bytes), **below}

    def _stats(self) -> dict[str, object]:
        shape = {"block_bytes": self.facts.block_bytes, "block_size": self.facts.block_size}
        found = self.loop.call(self.loop.stats, {**shape, "is_auto": self._config.tiers.hbm == "auto"})
        return found if self._events is None else {**found, "kv_events": self._events.stats()}


# -- the tiers below HBM -----------------------------------------------------------------------------------------------
def open_store(
    config: EngineConfig, loaded: Loaded, model: PositionFreeModel, num_blocks: int, disk: OpeningDisk | None,
    others: OtherRanks | None = None,
) -> KVConnector:  # fmt: skip
    """The connector for `config.tiers`; others, disk: see `open_tiered`. num_blocks: of the engine's pool.

    Raises ConfigError, ModelError or StoreError.
    """
    tiers, owner, reports, secret = config.tiers, config.disk_owner, config.kv_events is not None, config.common_root()

    def named(cache: Path | None) -> str:
        """Identify the weights. Only needed if KV outlives the process, or if another server reads its ids."""
        if owner is not None and tiers.path is not None:
            cache = Path(tiers.path).expanduser() / "weights.json"
        is_named = cache is not None or config.fleet_root() is not None
        return fingerprint(model, weights_digest(loaded.source, cache) if is_named else "", config.block_size)

    if not tiers.cpu and not tiers.disk:
        null = NullConnector(num_blocks, config.eviction, reports=reports)
        if secret is not None:
            null.fingerprint, null.root_secret = bytes.fromhex(named(None)), secret
        return null
    layout = model.layout(config.block_size)
    # Staging without a CPU tier: the loads of the longest request, and one block being filled for each running request.
    least_arena_blocks = 2 * config.max_num_seqs + -(-loaded.max_model_len // config.block_size)
    name, device, load = loaded.name, loaded.device, config.load
    return open_tiered(
        tiers, layout, name, named, device, load, least_arena_blocks, num_blocks, config.eviction, disk, reports,
        secret, others, owner,
    )  # fmt: skip


def open_events(config: EngineConfig, model: str) -> KVEvents | None:
    """Open the ports for events about KV, if they are wanted. Raises ConfigError."""
    if config.kv_events is None:
        return None
    try:
        from kvstore.remote.kv_events import KVEvents
    except ImportError:
        raise ConfigError("kv_events", "set, but needs pyzmq, which is not installed", "pip install pyzmq") from None
    return KVEvents(config.kv_events, config.kv_events_topic or default_topic(model))
