"""Prompts that another server computes for this one: which are worth it, and what becomes of them.

Control plane, one thread. A request waits until that server has said that its blocks are in the shared tier, and then
reads them there. Whatever goes wrong, it is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvstore.blocks.ids import TOKEN_BYTES, BlockId
from kvstore.policy.planner import Planner
from kvstore.remote.prefill import PrefillDone, PrefillJob, PrefillServer
from kvstore.store.requests import Tracked

LEAST_TOKENS = 128  # that are missing; fewer cost little beside the decoding of others
SLOWER = 2.0  # than computing here: so long is waited
LEAST_S, MOST_S, UNKNOWN_S = 2.0, 60.0, 10.0
GRACE_S = 1.0  # in which the server's threads say themselves that it is late


class Elsewhere:
    """stored: called for a request whose blocks have come to the shared tier."""

    def __init__(
        self, server: PrefillServer, planner: Planner, clock: Callable[[], float], block_size: int,
        stored: Callable[[Tracked], object],
    ) -> None:  # fmt: skip
        self.server = server
        self._planner, self._clock, self._block_size, self._stored = planner, clock, block_size, stored
        self._waiting: dict[BlockId, list[Tracked]] = {}  # by the last block that is asked for
        self._due_s: dict[Tracked, float] = {}  # until when each of them waits

    def ask(self, request: Tracked) -> None:
        """Let the rest of a prompt be computed there, if that is worth it. The request then waits, once at most."""
        num_blocks = request.num_loadable(self._block_size)
        num_missing = num_blocks - request.num_hbm_blocks - len(request.arrival)
        if num_missing * self._block_size < LEAST_TOKENS or not request.is_exact or request.was_elsewhere:
            return
        request.was_elsewhere = True
        seconds = self._patience_s(num_missing * self._block_size)
        name = request.chain[num_blocks - 1]
        if name not in self._waiting:
            tokens = bytes(request.tokens[: num_blocks * self._block_size * TOKEN_BYTES])
            root, starts = request.lineage.root, request.turn_starts
            if not self.server.ask(name, PrefillJob(tokens, root, request.tenant, seconds, starts)):
                return
            self._waiting[name] = []
        self._waiting[name].append(request)
        self._due_s[request] = self._clock() + seconds + GRACE_S

    def is_asking(self, request: Tracked, is_next: bool = True) -> bool:
        """Whether a request still waits; see `RemoteContents.is_asking`."""
        if is_next and self._due_s.get(request, math.inf) <= self._clock():
            del self._due_s[request]
        return request in self._due_s

    def _patience_s(self, num_tokens: int) -> float:
        rate = self._planner.prefill_tokens_per_s
        return UNKNOWN_S if rate is None else min(max(LEAST_S, SLOWER * num_tokens / rate), MOST_S)

    def poll(self) -> bool:
        """Let those go on whose server has answered. True when there was one."""
        done = self.server.completed()
        for one in done:
            self._ended(one)
        return bool(done)

    def _ended(self, done: PrefillDone) -> None:
        for request in self._waiting.pop(done.name):
            is_waiting = self._due_s.pop(request, None) is not None
            if is_waiting and done.num_blocks:
                self._stored(request)
