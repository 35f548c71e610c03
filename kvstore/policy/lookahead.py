"""The waiting order: whose blocks are read ahead, and whose must not be evicted. Metadata only.

The windows are those of CachedAttention (Gao et al., USENIX ATC 2024, section 3.3): as many waiting requests as the CPU
tier holds are prefetched, as many as CPU and disk hold together are protected.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvstore.policy.conversation import Conversation, QueueKey

SAVE_SHARE = 4  # one in this many arena blocks is not for reading ahead, but for saving what is computed meanwhile


@dataclass(frozen=True, slots=True)
class Waiting:
    """One waiting request. num_blocks: of its prompt that are stored, which it wants in the CPU tier when it starts."""

    key: QueueKey
    request_id: Hashable
    conversation: Conversation
    num_blocks: int


class LookAhead:
    """Waiting requests in the order in which they are expected to start.

    num_cpu_blocks: what prefetching may fill; num_disk_blocks: capacity of the disk. refresh: called with a
    conversation whose place in the window has changed. The windows are counted in blocks of the requests that really
    wait, which is C / S of the paper with the exact sum in place of the mean. The larger one is kept up to date with
    every change: O(log n), and what enters or leaves it.
    """

    def __init__(self, num_cpu_blocks: int, num_disk_blocks: int, refresh: Callable[[Conversation], None]) -> None:
        self.num_cpu_blocks = num_cpu_blocks
        self._num_protected_blocks = num_cpu_blocks + num_disk_blocks
        self._refresh = refresh
        self._order: list[Waiting] = []
        self._by_id: dict[Hashable, Waiting] = {}
        # The larger window: the first `_end` of the order, their blocks, and the keys by which each is wanted.
        self._end = self._num_blocks = 0
        self._keys: dict[Conversation, list[QueueKey]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._by_id

    def add(self, request_id: Hashable, key: QueueKey, conversation: Conversation, num_blocks: int) -> None:
        """Add a waiting request, or replace it."""
        self.remove(request_id)
        waiting = self._by_id[request_id] = Waiting(key, request_id, conversation, num_blocks)
        index = bisect.bisect_right(self._order, key, key=lambda other: other.key)
        self._order.insert(index, waiting)
        if index < self._end:
            self._end += 1
            self._enter(waiting)
        self._fit()

    def remove(self, request_id: Hashable) -> None:
        """Remove a request; ignores unknown ones."""
        if (waiting := self._by_id.pop(request_id, None)) is None:
            return
        index = bisect.bisect_left(self._order, waiting.key, key=lambda other: other.key)
        while self._order[index] is not waiting:  # different requests may have equal keys
            index += 1
        del self._order[index]
        if index < self._end:
            self._end -= 1
            self._exit(waiting)
        self._fit()  # it may also have been the one that no longer fitted

    def start(self, request_id: Hashable) -> None:
        """Note that a request runs, and needs its blocks more than any waiting one. Ignores unknown ones."""
        waiting = self._by_id.get(request_id)
        if waiting is not None:
            waiting.conversation.num_running += 1
            self.remove(request_id)
            self._refresh(waiting.conversation)

    def to_prefetch(self) -> list[Waiting]:
        """Requests whose blocks fit into the CPU tier together, in order of expected start; always the first one."""
        found: list[Waiting] = []
        left = self.num_cpu_blocks
        for waiting in self._order:
            left -= waiting.num_blocks
            if left < 0 and found:
                break
            found.append(waiting)
        return found

    def _fit(self) -> None:
        """Let the last ones leave the window, or the next ones enter; the first one is always in it."""
        most = self._num_protected_blocks
        while self._end > 1 and self._num_blocks > most:
            self._end -= 1
            self._exit(self._order[self._end])
        while self._end < len(self._order):
            waiting = self._order[self._end]
            if self._end and self._num_blocks + waiting.num_blocks > most:
                return
            self._end += 1
            self._enter(waiting)

    def _enter(self, waiting: Waiting) -> None:
        self._num_blocks += waiting.num_blocks
        bisect.insort(self._keys.setdefault(waiting.conversation, []), waiting.key)
        self._mark(waiting.conversation)

    def _exit(self, waiting: Waiting) -> None:
        self._num_blocks -= waiting.num_blocks
        keys = self._keys[waiting.conversation]
        keys.remove(waiting.key)
        if not keys:
            del self._keys[waiting.conversation]
        self._mark(waiting.conversation)

    def _mark(self, conversation: Conversation) -> None:
        wanted = next(iter(self._keys.get(conversation, ())), None)
        if conversation.wanted != wanted:
            conversation.wanted = wanted
            self._refresh(conversation)
