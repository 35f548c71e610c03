"""The engine in the program's own process: prompts in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from kvstore.config import CacheTiers
from kvstore.connector import KVConnector, hold_store
from kvstore.engine.config import EngineConfig
from kvstore.engine.core.step_loop import StepLoop
from kvstore.engine.front import Front
from kvstore.engine.local_core import SILENCE_S, LocalCore
from kvstore.engine.process.pulse import SLOW_FACTOR, Heart
from kvstore.engine.progress import shown
from kvstore.sessions.shared.opening import open_shared_sessions


class Engine(Front):
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
        session_replicas: int = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        distributed_executor: str = "here",
        progress: bool = False,
    ) -> None:
        tiers = CacheTiers.of(cache_tiers)
        config = EngineConfig(
            model, tiers, device, dtype, block_size, max_model_len, max_num_seqs, max_num_batched_tokens, load, seed,
            policy, eviction, tokenizer, revision, enforce_eager, chat_template, kv_events, kv_events_topic,
            session_store, session_durability, session_replicas, tensor_parallel_size, pipeline_parallel_size,
            distributed_executor,
        )  # fmt: skip
        with ExitStack() as opened, shown(progress):
            directory = hold_store(tiers)  # first, so that a store in use is noticed before weights are read
            if directory is not None:
                opened.callback(directory.close)
            sessions = open_shared_sessions(config.shared_sessions(), directory)
            if sessions is not None:
                opened.callback(sessions.close)
            heart = Heart(None, SLOW_FACTOR * SILENCE_S)
            opened.callback(heart.close)
            core = LocalCore(config, None if directory is None else directory.share(), heart)
            opened.callback(core.close)
            super().__init__(core, core.tokenizer, directory, opened, sessions)

    @property
    def loop(self) -> StepLoop:
        """For tests and measurements, like what follows."""
        return self._local.loop

    @property
    def connector(self) -> KVConnector:
        return self._local.connector

    @property
    def _local(self) -> LocalCore:
        assert isinstance(self.core, LocalCore)
        return self.core

    def check_integrity(self) -> None:
        """Assert that all counts agree, and that nothing is held when nothing runs."""
        self.loop.call(self.loop.check_integrity)
