"""The remote tier as the store sees it: what it has, what is read from it, and what is stored there.

What it has is known from its answers and from what was stored there; nothing of that is certain, only a read finds out.
Deletions are repeated until it has confirmed them. A prompt that another server computes for this one waits until that
server has said that its blocks are in the shared tier. Whatever goes wrong, it is computed here.

Control plane, one thread. The ordinary write-back also writes to disk what was read from there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, state_chain
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.policy.planner import Planner
from kvstore.remote.prefill import PrefillJob, PrefillServer
from kvstore.remote.spread import Believed, BelievedContents
from kvstore.store.context import Stage, StoreContext
from kvstore.store.remote_stores import RemoteStores
from kvstore.store.requests import Tracked
from kvstore.store.stored import Deletions, StoredBlocks, TierReads
from kvstore.store.write_back import WriteBack
from kvstore.tiers.port import Asked, Chain, Done, ReadDone, WriteDone

LEAST_TOKENS = 128  # that are missing; fewer cost little beside the decoding of others
SLOWER = 2.0  # than computing here: so long is waited
LEAST_S, MOST_S, UNKNOWN_S = 2.0, 60.0, 10.0
GRACE_S = 1.0  # in which the server's threads say themselves that it is late
MOST_DELETES, MOST_NAMED = 1 << 20, 1 << 12  # that wait, and with which states are named
ANSWER_S, ANSWER_SHARE = 0.1, 0.1  # a request waits so long for an answer, or for this share of computing


class Elsewhere:
    """stored: called for a request whose blocks have come to the shared tier."""

    def __init__(
        self, server: PrefillServer, planner: Planner, clock: Callable[[], float], block_size: int,
        stored: Callable[[Tracked], object],
    ) -> None:  # fmt: skip
        self.server = server
        self._planner, self._clock, self._block_size, self._stored = planner, clock, block_size, stored
        self._waiting: dict[BlockId, list[Tracked]] = {}  # by the last block that is asked for

    def ask(self, request: Tracked) -> None:
        """Let the rest of a prompt be computed there, if that is worth it. The request then waits, once at most."""
        num_blocks = request.num_loadable(self._block_size)
        num_missing = num_blocks - request.num_hbm_blocks - len(request.tiers)
        if num_missing * self._block_size < LEAST_TOKENS or request.is_spliced or request.was_elsewhere:
            return
        request.was_elsewhere = True
        seconds = self._patience_s(num_missing * self._block_size)
        name = request.chain[num_blocks - 1]
        if name not in self._waiting:
            tokens = bytes(request.tokens[: (num_blocks * self._block_size + 1) * TOKEN_BYTES])
            root, starts = request.lineage.root, request.turn_starts
            if not self.server.ask(name, PrefillJob(tokens, root, request.tenant, seconds, starts)):
                return
            self._waiting[name] = []
        self._waiting[name].append(request)
        request.waits_until_s = self._clock() + seconds + GRACE_S

    def _patience_s(self, num_tokens: int) -> float:
        rate = self._planner.prefill_tokens_per_s
        return UNKNOWN_S if rate is None else min(max(LEAST_S, SLOWER * num_tokens / rate), MOST_S)

    def poll(self) -> bool:
        """Let those go on whose server has answered. True when there was one."""
        done = self.server.completed()
        for name, num_blocks in done:
            for request in self._waiting.pop(name):
                is_waiting, request.waits_until_s = request.waits_until_s is not None, None
                if is_waiting and num_blocks:
                    self._stored(request)
        return bool(done)


class Questions:
    """Which requests and hints wait to hear what is there: of their blocks, and of states behind these. Where all that
    is stored is to be loaded, they wait until the question is given up.
    """

    def __init__(self, tier: Believed, stored: StoredBlocks, clock: Callable[[], float], planner: Planner) -> None:
        self._tier, self._stored, self._clock, self._planner = tier, stored, clock, planner
        self._asking: dict[int, tuple[Tracked, int]] = {}  # and how many answers to each question have not come
        self._numbers = count()

    def ask(self, request: Tracked) -> bool:
        """Ask for a request's chain. Returns whether an answer will come, for which the request waits a little, unless
        another has waited as long in vain.
        """
        number, size, ids = next(self._numbers), self._stored.block_size, list(request.chain)
        if self._stored.num_state_blocks:
            ids += [state_chain(block_id, 1, size)[0] for block_id in request.chain]
        num = self._tier.ask(number, Chain(request.lineage.root, tuple(ids))) if ids else 0
        if num:
            self._asking[number] = request, num
            rate = self._planner.prefill_tokens_per_s
            num_tokens = (len(request.chain) - request.num_hbm_blocks) * size
            patience_s = max(ANSWER_S, 0.0 if rate is None else ANSWER_SHARE * num_tokens / rate)
            wait_s = 0.0 if self._tier.asking_s > patience_s else patience_s
            request.waits_until_s = math.inf if self._planner.always else self._clock() + wait_s
        return num > 0

    def answered(self, asked: Asked) -> Tracked | None:
        """An answer has come, or none will. Returns who still waits, once that was the last."""
        request, num_left = self._asking.pop(asked.number)
        if num_left > 1:
            self._asking[asked.number] = request, num_left - 1
            return None
        is_waiting, request.waits_until_s = request.waits_until_s is not None, None
        return request if is_waiting else None


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """read: reads a block from disk, in any thread; None without a disk. prefill: another server, which computes
    prompts for this one; None without one. is_told: its owner hears by itself of what is evicted by hand.
    finds_states: what is deleted there takes the states behind it along.
    """

    tier: Believed
    read: Callable[[BlockRecord, memoryview], ReadResult] | None
    prefill: PrefillServer | None = None
    is_told: bool = False
    finds_states: bool = False


class RemoteBlocks:
    """disk: None without a disk. contents: what the tier is thought to have. tell: called for a request or hint when it
    is known what is there; returns whether that is a request, which has not left.
    """

    def __init__(
        self, context: StoreContext, planner: Planner, source: RemoteSource, contents: BelievedContents,
        disk: WriteBack | None, stored: StoredBlocks, reads: TierReads, tell: Callable[[Tracked], bool],
    ) -> None:  # fmt: skip
        self._source, self.contents, self._disk, self._reads = source, contents, disk, reads
        self._cpu, self._stats, clock = context.cpu, context.stats, context.clock
        self._planner, self._tell, self._stored = planner, tell, stored
        self._ended: deque[Done] = deque()
        self.questions = Questions(source.tier, stored, clock, planner)
        self.deletes = Deletions(source.tier, MOST_DELETES)
        self._unnamed: dict[BlockId, None] = {}  # deleted blocks whose states are not among `deletes` yet
        self.stores = RemoteStores(source.tier, context.cpu, stored, source.read, context.view, clock, self.deletes)
        self.elsewhere = None
        if source.prefill is not None:
            self.elsewhere = Elsewhere(source.prefill, planner, clock, stored.block_size, self.questions.ask)

    def arrive(self, request: Tracked) -> None:
        """Ask what is there of a new request, which waits a little for the answer."""
        if request.may_load:
            self.questions.ask(request)

    def poll(self) -> bool:
        """Collect what the threads have finished, and hand over what waits. Returns whether there was anything."""
        self._ended += self._source.tier.completed()
        moved = bool(self._ended)
        if self.elsewhere is not None:
            moved |= self.elsewhere.poll()
        while self._ended:  # one at a time, so that an error loses none of the others
            done = self._ended.popleft()
            if isinstance(done, Asked):
                self.contents.answered(done)
                request = self.questions.answered(done)
                if request is not None and self._tell(request) and self.elsewhere is not None:
                    self.elsewhere.ask(request)
            elif isinstance(done, ReadDone):
                self._read_done(done)
            elif isinstance(done, WriteDone):
                for block_id in self.stores.ended(done):
                    if block_id not in self.deletes.sizes:
                        self.contents.learn(block_id)
                self.deletes.ended(done.batch.deletes, done.error)
        self._name_states()
        self.deletes.pump()
        self.stores.pump()
        return moved

    def _read_done(self, done: ReadDone) -> None:
        arena_block, block_id = done.job.handle, done.job.record.block_id
        if done.result is ReadResult.OK:
            self._planner.read_remote(done.job.view.nbytes, done.seconds, done.num_active)
            self._stats.remote_read += 1
            if self._reads.publish(arena_block) and self._disk is not None:
                self._disk.add_dirty(arena_block)
                return
        else:
            self.contents.lose([block_id])
            gone = self._reads.fail(done, self._stats.remote_read_failures)
            if gone is not None and self._disk is not None:  # blocks read behind it may already be there
                self._disk.delete_tree(block_id, gone)
            cause = "remote_away" if self.contents.is_away(block_id) else done.result.lost_by
            self._stats.losses.note(cause, self.contents.name, block_id, why=done.result.value)
        self._cpu.release(arena_block)

    def offer(self, request: Tracked, states: Sequence[tuple[int, int]]) -> None:
        """A request has ended: share what is stored of its chain, and its states (see `KVStore.save_states`)."""
        size = self._stored.block_size
        borders = {num_tokens // size for num_tokens, _ in states}
        ends = {start // size for start in request.turn_starts}
        ends |= {border for border in borders if border + 1 not in borders or not self._stored.has_windows}
        self.stores.offer(request, sorted(ends), self.contents.contains)
        for border in sorted(borders):
            state = self._stored.state(request, border)
            self.stores.offer(state, (len(state.chain),), self.contents.contains, border)

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Delete these there, too, with the states behind them, which may be there alone."""
        num_blocks, found = self._stored.num_state_blocks, dict.fromkeys(block_ids)
        self.contents.lose([state_chain(one, 1, self._stored.block_size)[0] for one in found if num_blocks])
        if num_blocks and not self._source.finds_states:
            self._unnamed |= found
        self.delete(list(found))

    def _name_states(self) -> None:
        """Delete the states behind what is deleted, of which none is known: some at a time, as they are hundreds of
        names to a block.
        """
        while self._unnamed and len(self.deletes.sizes) < MOST_NAMED:
            block_id = next(reversed(self._unnamed))
            del self._unnamed[block_id]
            self.delete(state_chain(block_id, self._stored.num_state_blocks, self._stored.block_size))

    def is_deleting(self, block_ids: Collection[BlockId]) -> bool:
        """Whether some of these, or states behind them, are not deleted yet."""
        return self.deletes.has_some(block_ids) or not self._unnamed.keys().isdisjoint(block_ids)

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        """Delete these blocks there, and no others."""
        for block_id in block_ids:
            self.deletes.add(block_id)
        self.contents.lose(block_ids)

    def evicted(self, block_ids: Iterable[BlockId]) -> None:
        """These were evicted by hand here."""
        if not self._source.is_told:
            self.forget(block_ids)

    def num_shared(self, chain: Sequence[BlockId]) -> int:
        """How many of its first blocks are there."""
        return next((i for i, one in enumerate(chain) if not self.contents.contains(one)), len(chain))

    def stages(self) -> list[Stage]:
        """Chains that wait to be stored; what the tier has been given, and deletions."""
        return [self.stores.waiting, lambda: [*self.stores.running, *self.deletes.in_flight(), *self._nameable()]]

    def _nameable(self) -> Collection[BlockId]:
        return () if self._source.tier.is_refusing else self._unnamed.keys()

    @property
    def is_idle(self) -> bool:
        return self.stores.is_drained and not self.deletes.in_flight() and not self._nameable() and not self._ended

    def as_dict(self) -> dict[str, object]:
        return {
            **self._source.tier.as_dict(),
            "known_blocks": len(self.contents),
            "waiting_blocks": self.stores.num_waiting,
            "dropped_blocks": self.stores.num_dropped,
            **({} if self.elsewhere is None else {"prefill": self.elsewhere.server.as_dict()}),
        }

    def close(self, timeout_s: float) -> bool:
        """End after what runs. False when that took longer than given."""
        if self.elsewhere is not None:
            self.elsewhere.server.close(timeout_s)
        return self._source.tier.close(timeout_s)
