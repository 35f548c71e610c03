"""Our own policies on one cache and nothing else: requests in order of arrival, which take no time.

Uses the store's own pool and steering, by the rules of bench.references. The partial block of a prompt counts if the
trace names it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import cast

from bench.references import PROGRESS_EVERY, Hits
from kvstore.blocks.ids import BlockId
from kvstore.blocks.pool import BlockPool
from kvstore.errors import ConfigError
from kvstore.planning.server_blocks import prompt_of
from kvstore.planning.traces import ANSWER_TOKENS_PER_S, Trace, TraceRequest
from kvstore.planning.virtual_io import VirtualClock
from kvstore.policy.conversation import Answer, Conversation
from kvstore.policy.policies import Steering


def replay_one_tier(
    trace: Trace, capacity_blocks: int, policy: str, progress: Callable[[int], None] | None = None
) -> Hits:
    """progress: called now and then with the number of finished requests."""
    return OneTier(trace, capacity_blocks, policy).run(progress)


class OneTier:
    """One run of `replay_one_tier`."""

    def __init__(self, trace: Trace, capacity_blocks: int, policy: str) -> None:
        if capacity_blocks < 1:
            raise ConfigError(f"a tier of {capacity_blocks} blocks cannot be; give 1 or more")
        self._trace = trace
        self._clock = VirtualClock()
        self._steering = Steering(policy, self._clock, {"hbm": capacity_blocks})
        self._pool = BlockPool(capacity_blocks, self._steering.order("hbm"))
        self._partials: dict[BlockId, Conversation] = {}
        self._hits = Hits()

    def run(self, progress: Callable[[int], None] | None = None) -> Hits:
        ends_s = array("d")
        for number, request in enumerate(self._trace.requests, 1):
            after_s = ends_s[request.after] if request.after >= 0 else 0.0
            self._clock.now_s = max(self._clock.now_s, after_s + request.arrival_s)
            ends_s.append(after_s + request.arrival_s + request.num_output_tokens / ANSWER_TOKENS_PER_S)
            self._serve(request)
            if progress is not None and number % PROGRESS_EVERY == 0:
                progress(number)
        return self._hits

    def _serve(self, request: TraceRequest) -> None:
        """Count the hits of a request, the longest cached prefix of its prompt's blocks, before its own blocks come."""
        prompt, pool = prompt_of(request, self._trace.block_size), self._pool
        self._steering.poll()
        is_stored = bool(prompt) and pool.lookup(prompt[-1]) is not None
        conversation = self._steering.arrive(prompt, is_stored=is_stored)
        hits = self._match(prompt)
        pool.acquire(hits)
        pool.touch(hits, conversation)
        blocks = [*hits, *pool.allocate(min(len(prompt) - len(hits), pool.num_free))]
        for place in range(len(hits), len(blocks)):
            pool.insert(blocks[place], prompt[place], prompt[place - 1] if place else None, conversation)
        self._steering.end_request(conversation, prompt, Answer(request.num_output_tokens, request.calls_tool))
        num_hit = len(hits)
        if request.partial is not None and len(blocks) == len(prompt):
            num_hit += self._serve_partial(cast(BlockId, request.partial), prompt, blocks, conversation)
        pool.release(blocks)
        num_blocks = len(prompt) + (request.partial is not None)
        self._hits.count(num_blocks, num_hit, request.num_tokens, self._trace.block_size)

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
        """Append the prompt's last, partial block to `blocks`. Returns whether it is a hit.

        The conversation continues from the block before it, so this block has a conversation of its own, of the same
        value.
        """
        owner = self._partials.get(name)
        if owner is None:
            owner = self._partials[name] = self._steering.make(name)
        owner.use, owner.used_s, owner.category = conversation.use, conversation.used_s, conversation.category
        self._steering.refresh(owner)
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

    def check_integrity(self) -> None:
        """Assert that nobody holds a block and that all counts agree."""
        self._pool.check_integrity()
