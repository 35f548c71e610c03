"""Who asks what in a simulation: conversations over days, edits, bursts, aborts, hints, pins, deletions, restarts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.blocks.ids import BlockId, Lineage, lineage_root, quantised_id
from kvstore.blocks.records import Evict
from kvstore.engine.core.request import Request
from kvstore.engine.sampling_params import SamplingParams
from tests.simulation.parts import TOKEN_BYTES, VOCABULARY, quantised

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

HOUR_S, DAY_S = 3600.0, 86400.0
NUM_SYSTEM_PROMPTS, NUM_TENANTS = 3, 2


@dataclass(slots=True, eq=False)
class Talk:
    """A conversation as its client knows it. before_turn: tokens before the last message, which may be edited."""

    name: str
    tenant: str
    tokens: list[int]
    num_system: int
    priority: int
    turns_left: int
    chain: list[BlockId] = field(default_factory=list)
    lineage: Lineage | None = None
    keys: bytes = b""  # KV of its tokens, as far as they were computed
    before_turn: int = 0
    open: set[str] = field(default_factory=set)  # ids of its requests
    answers: list[Request] = field(default_factory=list)
    is_deleted: bool = False


class People:
    """Schedules all that happens from outside; by the seed alone."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.rng = rng = random.Random(f"people {sim.config.name} {sim.seed}")
        self._num_talks = self._num_requests = 0
        self._talk_of: dict[str, Talk] = {}
        self.talks: list[Talk] = []
        self._systems = [self._words(rng.randrange(9, 30)) for _ in range(NUM_SYSTEM_PROMPTS)]
        for _ in range(sim.config.talks):
            self._at(rng.uniform(0.0, 4 * HOUR_S), self._begin)
        faults = sim.config.faults
        per_day = [
            (self._burst, 5.0), (self._identical, 3.5), (self._evict, 2.5), (self._pin_all, 1.0),
            (lambda: sim.restart(crash=True), faults.crashes_per_day),
            (lambda: sim.restart(crash=False), faults.restarts_per_day),
        ]  # fmt: skip
        for what, number in per_day:
            if number:
                self._again(what, DAY_S / number)

    def _at(self, seconds: float, call) -> None:
        """From now, unless the days are over by then."""
        if self.sim.clock.now_s + seconds < self.sim.end_s:
            self.sim.clock.people.after(seconds, call)

    def _again(self, what, mean_s: float) -> None:
        def once() -> None:
            what()
            self._again(what, mean_s)

        self._at(self.rng.expovariate(1 / mean_s), once)

    def _words(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    # -- conversations -----------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        system = self.rng.choice(self._systems) if self.rng.random() < 0.8 else []
        self._num_talks += 1
        tenant = f"tenant-{self.rng.randrange(NUM_TENANTS)}"
        turns = self.rng.choice([1, 3, 6, 12, 25])
        talk = Talk(f"talk-{self._num_talks}", tenant, list(system), len(system), self.rng.choice([0, 0, 1, 5]), turns)
        self.talks.append(talk)
        self._say(talk)

    def _end(self, talk: Talk) -> None:
        if talk in self.talks:
            self.talks.remove(talk)
            self._at(self.rng.expovariate(1 / HOUR_S), self._begin)

    def _say(self, talk: Talk) -> None:
        if talk.open or talk.is_deleted:
            return
        rng, sim = self.rng, self.sim
        if talk.before_turn and rng.random() < 0.12:
            self._edit(talk)
        talk.before_turn = len(talk.tokens)
        talk.tokens = talk.tokens + self._words(rng.randrange(2, 22))
        num_output, n = rng.randrange(1, 18), rng.choice([1] * 8 + [2, 3])
        if len(talk.tokens) + num_output > sim.config.window:
            self._truncate(talk)
        self._submit(talk, num_output, n)

    def _edit(self, talk: Talk) -> None:
        """The last message again, in other words."""
        sim = self.sim
        sim.counts["edits"] += 1
        talk.tokens = talk.tokens[: talk.before_turn]
        talk.chain = talk.chain[: len(talk.tokens) // sim.config.block_size]
        if talk.lineage is not None and talk.lineage.splice_end > len(talk.chain):
            talk.chain, talk.lineage = [], None

    def _truncate(self, talk: Talk) -> None:
        """Keep the first words and the last ones, with their KV where the store can splice."""
        sim, size, end = self.sim, self.sim.config.block_size, len(talk.tokens)
        start = max(talk.num_system, end - sim.config.window // 2 + talk.num_system)
        spans = [(0, talk.num_system), (start, end)] if talk.num_system else [(start, end)]
        kept = [token for first, last in spans for token in talk.tokens[first:last]]
        found = None
        if talk.lineage is not None and self.rng.random() < 0.7:
            found = sim.connector.splice(talk.chain, talk.tokens, talk.lineage, spans, talk.tenant)
        sim.note(f"{talk.name} is cut from {end} to {len(kept)} tokens, spliced: {found is not None}")
        sim.counts["spliced" if found else "cut"] += 1
        if found is None:
            talk.chain, talk.lineage = [], None
        else:
            chain, lineage = found
            keys = b"".join(talk.keys[first * TOKEN_BYTES : last * TOKEN_BYTES] for first, last in spans)
            for run in lineage.splices:
                sim.book.begin_with(run.parent)
            for index, block_id in enumerate(chain):
                content = keys[index * size * TOKEN_BYTES : (index + 1) * size * TOKEN_BYTES]
                sim.book.name(block_id, lineage.parent(chain, index), content)
                sim.book.name_state(block_id, content)
            talk.chain, talk.lineage = list(chain), lineage
        talk.tokens, talk.before_turn = kept, 0

    def _submit(self, talk: Talk, num_output: int, n: int) -> None:
        sim = self.sim
        self._num_requests += 1
        lineage = talk.lineage or Lineage(
            lineage_root(sim.connector.root_secret, sim.connector.fingerprint.hex(), talk.tenant)
        )
        stops = (1, 2, 3) if sim.config.runs_ahead else ()
        is_exact = sim.config.quantises > 0 and self.rng.random() < 0.1
        params = SamplingParams(n=n, max_tokens=num_output, temperature=0, stop_token_ids=stops, kv_exact=is_exact)
        first = Request(
            f"r{self._num_requests}", list(talk.tokens), params, num_output, lineage, sim.config.block_size, seed=0,
            priority=talk.priority, arrival_s=sim.clock.now_s, tenant=talk.tenant, chain=list(talk.chain),
        )  # fmt: skip
        requests = [first, *(first.sibling(index) for index in range(1, n))]
        talk.open, talk.answers = {request.request_id for request in requests}, []
        self._talk_of |= dict.fromkeys(talk.open, talk)
        sim.note(f"{talk.name} submits {first.request_id}: {len(talk.tokens)} tokens, {n} x {num_output}")
        sim.counts["submitted"] += 1
        sim.submit(requests)
        if self.rng.random() < 0.12:
            delay_s = self.rng.choice([0.0, 0.003, 0.03, 0.1, 0.3, 2.0])
            self._at(delay_s, lambda: self._abort([request.request_id for request in requests]))

    # -- ends --------------------------------------------------------------------------------------------------------
    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self.sim.scheduler.roster.requests:
                self.sim.abort(request_id)
                self._left(request_id)

    def ended(self, request: Request) -> None:
        """It has its whole answer."""
        talk = self._talk_of[request.request_id]
        talk.answers.append(request)
        self.sim.counts["finished"] += 1
        if request.params.kv_exact:
            self.sim.counts["exact"] += 1
            story = self.sim.book.story(request)
            assert request.lineage.splice_index is None and quantised(story) != story, "an exact answer is not exact"
        self._left(request.request_id)

    def all_ended(self, requests: dict[str, Request]) -> None:
        """After an error or a restart."""
        for request_id in list(requests):
            self._left(request_id)

    def _left(self, request_id: str) -> None:
        talk = self._talk_of.pop(request_id, None)
        self.sim.accounts.pop(request_id, None)
        if talk is None:
            return
        talk.open.discard(request_id)
        if not talk.open:
            if talk.answers:
                self._take(talk, self.rng.choice(talk.answers))
            for request in talk.answers:
                self.sim.book.close(request)
            talk.answers = []
            self._rest(talk)

    def _take(self, talk: Talk, answer: Request) -> None:
        """It goes on with this answer, the last token of which has no KV yet."""
        size = self.sim.config.block_size
        talk.tokens, talk.lineage = list(answer.token_ids), answer.lineage
        talk.chain = answer.chain[: (len(talk.tokens) - 1) // size]
        talk.keys = bytes(self.sim.book.story(answer))

    def _rest(self, talk: Talk) -> None:
        """Until it comes back, if it does."""
        rng, sim = self.rng, self.sim
        talk.turns_left -= 1
        if talk.turns_left <= 0 or talk.is_deleted:
            self._at(rng.expovariate(1 / HOUR_S), lambda: self._maybe_delete(talk))
            return
        mean_s = rng.choice([5.0, 30.0, 30.0, 300.0, 300.0, 2400.0, 4 * HOUR_S, 20 * HOUR_S])
        pause_s = rng.expovariate(1 / mean_s)
        self._at(pause_s, lambda: self._say(talk))
        if rng.random() < 0.25:
            self._at(max(0.0, pause_s - rng.uniform(0.0, 5.0)), lambda: self._hint(talk))
        if rng.random() < 0.05:
            seconds = rng.choice([60.0, HOUR_S, 3 * DAY_S, 0.0])
            sim.connector.pin(talk.chain, seconds)
            sim.counts["pins"] += 1
        if rng.random() < 0.05:
            at_s = rng.choice([sim.clock.now_s + rng.expovariate(1 / HOUR_S), math.inf])
            sim.connector.pin(talk.chain, None, at_s)
            sim.counts["expiries"] += 1
        if rng.random() < 0.02:
            self._maybe_delete(talk)

    def _hint(self, talk: Talk) -> None:
        if talk.chain and talk.lineage is not None and not talk.is_deleted:
            self.sim.counts["hints"] += 1
            self.sim.note(f"a hint for {talk.name}")
            self.sim.connector.prefetch(talk.chain, talk.tokens, talk.lineage, talk.tenant)

    def _maybe_delete(self, talk: Talk) -> None:
        """Some sessions are deleted, others stay as they are."""
        self._end(talk)
        if talk.open or self.rng.random() < 0.5:
            return
        talk.is_deleted = True
        running = self.sim.scheduler.roster.requests.values()
        shared = {quantised_id(one) for other in (*self.talks, *running) for one in other.chain}
        own = [block_id for block_id in talk.chain if quantised_id(block_id) not in shared]
        if own:
            self.sim.note(f"{talk.name} is deleted: {len(own)} blocks")
            self.sim.forget(own)

    # -- what comes in between ---------------------------------------------------------------------------------------
    def _burst(self) -> None:
        """Many come back at once."""
        self.sim.counts["bursts"] += 1
        for talk in self.rng.sample(self.talks, len(self.talks) * 2 // 3):
            self._at(self.rng.uniform(0.0, 0.2), lambda talk=talk: self._say(talk))

    def _identical(self) -> None:
        """Programs that send the same prompt, each time a bit longer, without a session."""
        rng = self.rng
        tokens = self._systems[0] + [11] * rng.randrange(4, 60)
        for _ in range(rng.randrange(2, 7)):
            talk = Talk("program", "tenant-0", tokens[:], 0, 0, 1, is_deleted=True)
            self._submit(talk, rng.randrange(1, 9), 1)

    def _evict(self) -> None:
        """By hand, at any time."""
        sim, rng = self.sim, self.rng
        what = rng.choice([
            Evict(unused_for_s=rng.choice([60.0, HOUR_S, DAY_S])),
            Evict(to_bytes=rng.randrange(sim.config.cpu_blocks + 1) * sim.book.block_bytes),
            Evict(everything=True, to_bytes=rng.randrange(sim.config.cpu_blocks + 1) * sim.book.block_bytes),
            Evict(everything=True, dry_run=True),
            Evict(everything=True),
            Evict(block_ids=frozenset(rng.choice(self.talks).chain) if self.talks else frozenset()),
        ])  # fmt: skip
        sim.note(f"evict {what if what.block_ids is None else len(what.block_ids)}")
        sim.counts["evict commands"] += 1
        _, found = sim.connector.upkeep.evict(what)
        if not what.dry_run:
            for block in [block for block in map(sim.pool.lookup, found) if block is not None]:
                if sim.pool.is_free(block):
                    sim.pool.forget(block)

    def _pin_all(self) -> None:
        """More than there is room for: pins never wedge a pool."""
        self.sim.counts["pins of everything"] += 1
        for talk in self.talks:
            if talk.chain:
                self.sim.connector.pin(talk.chain, 10 * DAY_S)
