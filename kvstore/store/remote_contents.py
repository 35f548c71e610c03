"""What the remote tier is known to have: from its answers when it was asked for chains, and from what was stored there.

Control plane, one thread. Nothing here is certain: only a read finds out.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from kvstore.blocks.ids import BlockId
from kvstore.remote.shared import SharedChain
from kvstore.remote.tier import Asked, RemoteTier
from kvstore.store.requests import Tracked

MOST_KNOWN = 1 << 18  # blocks
KNOWN_S = 300.0  # how long an answer is believed
ANSWER_S = 0.1  # how long a request waits for an answer


@dataclass(eq=False)
class RemoteContents:
    """answered: called with a request or hint when its answer has come. always: wait until the question is given up,
    instead of ANSWER_S.
    """

    _tier: RemoteTier
    _clock: Callable[[], float]
    _answered: Callable[[Tracked], None]
    _always: bool

    def __post_init__(self) -> None:
        self._known: OrderedDict[BlockId, float] = OrderedDict()  # when each was last heard of
        self._asking: dict[int, Tracked] = {}
        self._due_s: dict[Tracked, float] = {}  # until when each waits for its answer
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._known)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the block is worth reading from there."""
        heard_s = self._known.get(block_id)
        return heard_s is not None and self._clock() - heard_s < KNOWN_S and not self._tier.breaker.is_open

    def ask(self, request: Tracked) -> bool:
        """Ask for a request's chain. Returns whether an answer will come, for which the request waits a little, unless
        another has waited as long in vain.
        """
        number = next(self._numbers)
        chain = SharedChain(request.lineage.root, tuple(request.chain))
        is_asked = bool(request.chain) and self._tier.ask(number, chain)
        if is_asked:
            self._asking[number] = request
            wait_s = 0.0 if self._tier.asks.running_s > ANSWER_S else ANSWER_S
            self._due_s[request] = math.inf if self._always else self._clock() + wait_s
        return is_asked

    def asked(self, asked: Asked) -> None:
        """An answer has come, or none will."""
        request = self._asking.pop(asked.number, None)
        for block_id, is_there in zip(asked.chain.ids, asked.there or (), strict=False):
            if is_there:
                self.learn(block_id)
            else:
                self._known.pop(block_id, None)
        if request is not None and self._due_s.pop(request, None) is not None:
            self._answered(request)

    def is_asking(self, request: Tracked, is_next: bool = True) -> bool:
        """Whether a request still waits for its answer. is_next: it could be scheduled now, and does not wait any more
        once it has waited long enough; a late answer is of use to those that are still in the queue.
        """
        if is_next and self._due_s.get(request, math.inf) <= self._clock():
            del self._due_s[request]
        return request in self._due_s

    def learn(self, block_id: BlockId) -> None:
        """Note that a block is there."""
        self._known[block_id] = self._clock()
        self._known.move_to_end(block_id)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def lose(self, block_ids: Iterable[BlockId]) -> None:
        """Note that these are not there, or are about to be deleted."""
        for block_id in block_ids:
            self._known.pop(block_id, None)
