"""HBM blocks: prefix hits, allocation, caching, release, and erasure of deleted KV. No tensors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import BlockId, token_bytes
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Evict
from kvstore.engine.core.request import Request


@dataclass(frozen=True, slots=True)
class Allocation:
    """What changed in a request's block table: entries from `first_index` on are now `block_numbers`."""

    first_index: int
    block_numbers: tuple[int, ...]
    copy: tuple[int, int] | None = None  # source, destination: others still read the block that the request writes next


UNCHANGED = Allocation(0, ())


class KVCacheManager:
    """Gives requests their blocks. A block with several references is never written: its writer gets a copy.

    holdings: is told which blocks can be found. The pool tells it which blocks no longer can.
    """

    def __init__(self, pool: BlockPool, block_size: int, holdings: Holdings | None = None) -> None:
        self.pool = pool
        self.block_size = block_size
        self._holdings = holdings

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the request's longest known prefix, head first.

        At least one token is left to compute, as sampling needs its logits.
        """
        hits: list[int] = []
        for block_id in request.chain[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.lookup(block_id)
            if block is None:
                break
            hits.append(block)
        return hits

    def admit(self, request: Request, hits: Sequence[int], num_new_tokens: int) -> bool:
        """Give a request that holds nothing its hit blocks and room for `num_new_tokens` more. All or nothing."""
        assert not request.block_numbers, f"{request.request_id} holds blocks already"
        needed = self.num_blocks(len(hits) * self.block_size + num_new_tokens) - len(hits)
        if needed > self.pool.num_free - sum(self.pool.is_free(block) for block in hits):
            return False
        self.pool.acquire(hits)
        request.block_numbers = [*hits, *self.pool.allocate(needed)]
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_hashed_blocks = len(hits)
        return True

    def allocate(self, request: Request, num_new_tokens: int) -> Allocation | None:
        """Allocate room for the next `num_new_tokens` of a request that holds its blocks; None when the pool has too
        few.
        """
        table = request.block_numbers
        index = request.num_computed_tokens // self.block_size
        shared = index < len(table) and self.pool.ref_count(table[index]) > 1
        needed = self.num_blocks(request.num_computed_tokens + num_new_tokens) - len(table)
        if needed <= 0 and not shared:
            return UNCHANGED
        if needed + shared > self.pool.num_free:
            return None
        first_index, copy = len(table), None
        if shared:
            (private,) = self.pool.allocate(1)
            copy = (table[index], private)
            self.pool.release([table[index]])
            table[index] = private
            first_index = index
        table.extend(self.pool.allocate(max(needed, 0)))
        return Allocation(first_index, tuple(table[first_index:]), copy)

    def share(self, owner: Request, child: Request) -> None:
        """Let `child` refer to all blocks of its prompt, which `owner` has computed, the partial tail included."""
        count = self.num_blocks(child.num_prompt_tokens)
        child.block_numbers = owner.block_numbers[:count]
        self.pool.acquire(child.block_numbers)
        child.num_computed_tokens = child.num_prompt_tokens
        child.num_hashed_blocks = child.num_prompt_tokens // self.block_size

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Put the full blocks of its first `num_tokens` tokens into the pool's map: they are computed or being loaded,
        and other requests of this step share them.
        """
        full = num_tokens // self.block_size
        for index in range(request.num_hashed_blocks, full):
            self._insert(request, index)
        request.num_hashed_blocks = max(request.num_hashed_blocks, full)

    def _insert(self, request: Request, index: int) -> None:
        """Insert a block, linked to its parent only if this request holds that: a block's holder must hold its
        parent.
        """
        block_id, parent_id = request.chain[index], request.chain[index - 1] if index else None
        if index and self.pool.block_id(request.block_numbers[index - 1]) != parent_id:
            parent_id = None
        inserted = self.pool.insert(request.block_numbers[index], block_id, parent_id, request.conversation)
        if inserted and self._holdings is not None:
            parent_id = request.lineage.parent(request.chain, index)
            tokens = token_bytes(request.token_ids[index * self.block_size : (index + 1) * self.block_size])
            self._holdings.stored(Place.HBM, block_id, parent_id, tokens, request.tenant)

    def free(self, request: Request) -> None:
        """Release the request's blocks; full ones stay cached until they are allocated again."""
        self.pool.release(request.block_numbers)
        request.block_numbers = []
        request.num_computed_tokens = 0
        request.num_hashed_blocks = 0


class Erasure:
    """Erases deleted blocks of one pool, between two steps. overwrite: clears HBM blocks."""

    def __init__(self, pool: BlockPool, overwrite: Callable[[Sequence[int]], None]) -> None:
        self._pool = pool
        self._overwrite = overwrite
        self.pending: set[int] = set()  # deleted blocks that a request still held

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Forget these blocks and overwrite them. A block that a request holds is overwritten once it is released."""
        self._forget(self._known(block_ids))

    def evict(self, what: Evict, block_ids: frozenset[BlockId]) -> int:
        """Evict these blocks and all that match, except blocks in use. Returns their number."""
        conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
        if what.everything and all(condition is None for condition in conditions):
            blocks = list(self._pool.cached_blocks())
        else:
            blocks = self._known(block_ids if what.block_ids is None else block_ids | what.block_ids)
        free = [block for block in blocks if self._pool.is_free(block)]
        if not what.dry_run:
            self._forget(free)
        return len(free)

    def _known(self, block_ids: Iterable[BlockId]) -> list[int]:
        return [block for block in map(self._pool.lookup, block_ids) if block is not None]

    def _forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._pool.forget(block)
            self.pending.add(block)
        self.go_on(always=True)

    def go_on(self, always: bool = False) -> None:
        """Overwrite blocks that have become free. always: also blocks without an id, which may be a deleted
        session's.
        """
        free = {block for block in self.pending if self._pool.is_free(block)}
        if not free and not always:
            return
        self.pending -= free
        if stale := self._pool.take_stale():
            self._overwrite(stale)
