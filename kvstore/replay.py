"""Replays a trace through the classes of the engine, without tensors and on a virtual clock: what would hit, and when.

Deterministic: the same trace and configuration give the same result.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import cast

from kvstore.block import BlockId
from kvstore.conversation import Conversation
from kvstore.errors import ConfigError
from kvstore.pool import BlockPool
from kvstore.replay_config import REPLAY_POLICIES, ReplayConfig, ReplayResult, ServiceModel, check_policy
from kvstore.replay_guide import Guide, VirtualClock, prompt_of
from kvstore.replay_service import PROGRESS_EVERY, Replay
from kvstore.traces import ANSWER_TOKENS_PER_S, Trace, TraceRequest

__all__ = [
    "REPLAY_POLICIES", "OneTier", "Replay", "ReplayConfig", "ReplayResult", "ServiceModel", "replay", "replay_one_tier"
]  # fmt: skip


def replay(trace: Trace, config: ReplayConfig, progress: Callable[[int], None] | None = None) -> ReplayResult:
    """Serve the trace. progress: called now and then with the number of requests that have ended."""
    return Replay(trace, config, progress).run()


def replay_one_tier(
    trace: Trace, capacity_blocks: int, policy: str, progress: Callable[[int], None] | None = None
) -> ReplayResult:
    """One cache and nothing else: requests in order of arrival, each of which takes no time.

    A request's hits are counted before its own blocks come, as the longest prefix of its prompt's blocks that is
    there, the partial one included where the trace names it.
    """
    return OneTier(trace, capacity_blocks, policy).run(progress)


class OneTier:
    """One run of `replay_one_tier`."""

    def __init__(self, trace: Trace, capacity_blocks: int, policy: str) -> None:
        check_policy(policy)
        if capacity_blocks < 1:
            raise ConfigError(f"a tier of {capacity_blocks} blocks cannot be; give 1 or more")
        self._trace = trace
        self._clock = VirtualClock()
        self._guide = Guide(policy, self._clock, {"hbm": capacity_blocks}, trace)
        self._pool = BlockPool(capacity_blocks, self._guide.order("hbm"))
        self._partials: dict[BlockId, Conversation] = {}
        self._num_blocks = self._num_hit_blocks = self._num_tokens = self._num_hit_tokens = 0

    def run(self, progress: Callable[[int], None] | None = None) -> ReplayResult:
        ends_s = array("d")
        for index, request in enumerate(self._trace.requests):
            after_s = ends_s[request.after] if request.after >= 0 else 0.0
            self._clock.now_s = max(self._clock.now_s, after_s + request.arrival_s)
            ends_s.append(after_s + request.arrival_s + request.num_output_tokens / ANSWER_TOKENS_PER_S)
            self._serve(index, request)
            if progress is not None and (index + 1) % PROGRESS_EVERY == 0:
                progress(index + 1)
        return self._result()

    def _serve(self, index: int, request: TraceRequest) -> None:
        prompt = prompt_of(request, self._trace.block_size)
        is_stored = bool(prompt) and self._pool.lookup(prompt[-1]) is not None
        conversation = self._guide.arrive(index, prompt, is_stored)
        hits = self._match(prompt)
        self._pool.acquire(hits)
        self._pool.touch(hits, conversation)
        blocks = [*hits, *self._pool.allocate(min(len(prompt) - len(hits), self._pool.num_free))]
        for place in range(len(hits), len(blocks)):
            self._pool.insert(blocks[place], prompt[place], prompt[place - 1] if place else None, conversation)
        self._guide.leave(conversation, prompt, request)
        num_hit = len(hits)
        if request.partial is not None and len(blocks) == len(prompt):
            num_hit += self._serve_partial(cast(BlockId, request.partial), prompt, blocks, conversation)
        self._pool.release(blocks)
        self._num_blocks += len(prompt) + (request.partial is not None)
        self._num_hit_blocks += num_hit
        self._num_tokens += request.num_tokens
        self._num_hit_tokens += min(num_hit * self._trace.block_size, request.num_tokens)

    def _match(self, prompt: Sequence[BlockId]) -> list[int]:
        hits: list[int] = []
        for name in prompt:
            block = self._pool.lookup(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def _serve_partial(
        self, name: BlockId, prompt: Sequence[BlockId], blocks: list[int], conversation: Conversation
    ) -> bool:
        """The prompt's last, not full block, appended to `blocks`; whether it is a hit.

        The conversation goes on from the block before it, so it has one of its own, of the same value.
        """
        owner = self._partials.get(name)
        if owner is None:
            owner = self._partials[name] = self._guide.steering.make(name)
        owner.use, owner.used_s, owner.category = conversation.use, conversation.used_s, conversation.category
        self._guide.refresh(owner)
        block = self._pool.lookup(name)
        if block is not None:
            self._pool.acquire((block,))
            self._pool.touch((block,), owner)
            blocks.append(block)
            return True
        if self._pool.num_free:
            (block,) = self._pool.allocate(1)
            self._pool.insert(block, name, prompt[-1] if prompt else None, owner)
            blocks.append(block)
        return False

    def _result(self) -> ReplayResult:
        nothing = dict.fromkeys(("save", "load", "write", "read"), 0)
        hits = {"hbm": self._num_hit_tokens, "cpu": 0, "disk": 0}
        return ReplayResult(
            num_requests=len(self._trace.requests),
            num_refused=0,
            num_prompt_tokens=self._num_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_blocks=self._num_blocks,
            num_hit_blocks=self._num_hit_blocks,
            hits_at_arrival=hits,
            hits_at_schedule=dict(hits),
            bytes_moved=nothing,
            num_evicted={"hbm": self._pool.num_evictions, "cpu": 0, "disk": 0},
            num_dropped_saves=0,
            num_dropped_writes=0,
            num_expired=0,
            ttft_mean_s=0.0,
            ttft_p90_s=0.0,
            mean_queue=0.0,
            duration_s=self._clock.now_s,
            in_force=self._guide.in_force(),
        )

    def check_integrity(self) -> None:
        """Assert that nobody holds a block and all counts agree."""
        self._pool.check_integrity()
