"""A simulated fleet: servers of `replay` side by side on one clock, a router in front of them, and a tier that they
share.

A few servers with their share of the conversations stand for a large fleet. A turn is routed among all servers of the
fleet; each simulated one stands for several, and keeps apart what those would hold. Prompts and loads run at full rate.
The shared tier has these servers' share of its size and bandwidth. Its waits come out rather too long, as few large
transfers stand for many small ones.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from kvstore.blocks.ids import BlockId
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.errors import ConfigError
from kvstore.planning.jobs import Job, chain_of, prompt_of
from kvstore.planning.replay import Arrived, Beside, Replay
from kvstore.planning.replay_config import ReplayConfig
from kvstore.planning.sizing import nominal_arrivals
from kvstore.planning.timeline import Timeline
from kvstore.planning.traces import Trace, TraceRequest
from kvstore.planning.virtual_io import VirtualClock
from kvstore.policy.conversation import Conversations
from kvstore.policy.planner import LEAST_SAVING_S, LEAST_SHARE

ROUTINGS = ("sticky", "random", "aware")
SAMPLE = 10  # servers that are simulated at most
NUM_LOOKED_AT = 2  # servers beside those that had the conversation, which an aware router looks at
MOST_KNOWN = 8  # servers that had a conversation
BACKLOG_S = 2.0  # of writes to the shared tier; what would be more is dropped
STANDS_FOR = 1 << 56  # between the names of the blocks of servers that one stands for
FLEET_TIERS = ("hbm", "cpu", "disk", "remote")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """num_servers: in the fleet. remote_blocks: size of the shared tier; 0 for none. network_bytes_per_s: of each
    server's link. remote_bytes_per_s: of the shared tier, in all. restarts: whether a tenth of the servers restarts
    halfway. keeps_disk: whether these keep their disks. sample: the trace is the traffic of so many servers.
    """

    num_servers: int
    routing: str
    server: ReplayConfig
    remote_blocks: int = 0
    network_bytes_per_s: float = 3e9
    remote_bytes_per_s: float = 12e9
    restarts: bool = False
    keeps_disk: bool = True
    sample: int = SAMPLE
    seed: int = 0

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ConfigError(f"unknown routing {self.routing!r}; known are {', '.join(ROUTINGS)}")
        if self.num_servers < 1 or self.sample < 1:
            raise ConfigError(f"a fleet of {self.num_servers} servers cannot be; give 1 or more")
        if self.remote_blocks and not self.server.cpu_blocks:
            raise ConfigError("a shared tier is read into the CPU tier; give --cpu a size")

    @property
    def num_simulated(self) -> int:
        """The most servers of which each can stand for equally many."""
        return max(one for one in range(1, self.sample + 1) if self.num_servers % one == 0)


@dataclass(slots=True)
class Counted:
    """The counts of a group of requests."""

    num_tokens: int = 0
    hits: Counter[str] = field(default_factory=Counter)  # tokens, by the tier that held them on arrival
    ttft_s: list[float] = field(default_factory=list)

    def add(self, num_tokens: int, hits: Counter[str], ttft_s: float) -> None:
        self.num_tokens += num_tokens
        self.hits += hits
        self.ttft_s.append(ttft_s)

    def as_dict(self) -> dict[str, object]:
        """ttft_p90_s: nine of ten requests are at most this slow."""
        ttft_s, num_tokens = sorted(self.ttft_s), max(self.num_tokens, 1)
        return {
            "requests": len(ttft_s),
            "hit_rate": self.hits.total() / num_tokens,
            "hit_rate_by_tier": {tier: self.hits[tier] / num_tokens for tier in FLEET_TIERS},
            "ttft_mean_s": sum(ttft_s) / len(ttft_s) if ttft_s else 0.0,
            "ttft_p90_s": ttft_s[-(-9 * len(ttft_s) // 10) - 1] if ttft_s else 0.0,
        }


# -- the shared tier ---------------------------------------------------------------------------------------------------
class Cable:
    """A link that passes transfers one after another. share: the part of its rate that these servers have."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float, share: float = 1.0) -> None:
        self._clock, self._bytes_per_s, self._share = clock, bytes_per_s, share
        self._free_s = 0.0
        self.num_bytes = 0

    @property
    def backlog_s(self) -> float:
        return max(self._free_s - self._clock.now_s, 0.0)

    def takes_s(self, num_bytes: int) -> float:
        """Seconds from now to the end of such a transfer."""
        return self.backlog_s + num_bytes / self._bytes_per_s

    def pass_on(self, num_bytes: int) -> None:
        busy_s = num_bytes / (self._bytes_per_s * self._share)
        self._free_s = max(self._free_s, self._clock.now_s) + busy_s
        self.num_bytes += num_bytes


class SharedTier:
    """Blocks by their names in the trace. The least recently used are evicted first, tails before heads. Reads and
    writes have separate links.
    """

    def __init__(self, config: FleetConfig, clock: VirtualClock, num_simulated: int) -> None:
        share = num_simulated / config.num_servers
        self._clock, self._block_bytes = clock, config.server.block_bytes
        self._most_bytes = round(config.remote_blocks * share) * self._block_bytes
        self._index = DiskIndex(clock)
        self._coming: set[BlockId] = set()
        self.reads = Cable(clock, config.remote_bytes_per_s, share)
        self.writes = Cable(clock, config.remote_bytes_per_s, share)
        self._in, self._out = (
            [Cable(clock, config.network_bytes_per_s) for _ in range(num_simulated)] for _ in range(2)
        )
        self.num_dropped = self.num_written = 0

    def num_stored(self, chain: Sequence[BlockId], first: int, end: int) -> int:
        """How many blocks of the chain are stored, from `first` on."""
        if not self._most_bytes:
            return 0
        found = bisect_left(range(first, end), True, key=lambda index: chain[index] not in self._index)
        self._index.touch(chain[: first + found], self._clock.now_s)
        return found

    def read_s(self, place: int, num_blocks: int) -> float:
        """How long this server would wait for so many blocks."""
        num_bytes = num_blocks * self._block_bytes
        return max(self._in[place].takes_s(num_bytes), self.reads.takes_s(num_bytes))

    def read(self, place: int, num_blocks: int) -> float:
        takes_s = self.read_s(place, num_blocks)
        for cable in (self._in[place], self.reads):
            cable.pass_on(num_blocks * self._block_bytes)
        return takes_s

    def write(self, chain: Sequence[BlockId], place: int) -> None:
        """Write the blocks of the chain that are not stored yet, unless the links are too busy."""
        network = self._out[place]
        if not self._most_bytes:
            return
        first = self.num_stored(chain, 0, len(chain))
        new = [name for name in chain[first:] if name not in self._coming]
        if network.backlog_s > BACKLOG_S or self.writes.backlog_s > BACKLOG_S:
            self.num_dropped += len(new)
            return
        num_bytes = len(new) * self._block_bytes
        ends_s = self._clock.now_s + max(network.takes_s(num_bytes), self.writes.takes_s(num_bytes))
        network.pass_on(num_bytes)
        self.writes.pass_on(num_bytes)
        self._coming.update(new)
        self._clock.at(ends_s, self._written, (chain[first - 1 : first] if first else [], chain[first:]))

    def _written(self, parent_and_chain: tuple[Sequence[BlockId], Sequence[BlockId]]) -> None:
        before, chain = parent_and_chain
        parent: BlockId = before[0] if before else b""
        now_s = self._clock.now_s
        for name in chain:
            if (not before or parent in self._index) and name not in self._index:
                self._index.add(IndexEntry(name, parent, self._block_bytes, now_s, now_s))
                self.num_written += 1
            self._coming.discard(name)
            before, parent = [name], name
        self._index.take_victims(self._index.bytes.total - self._most_bytes)


# -- the fleet ---------------------------------------------------------------------------------------------------------
def sessions_of(trace: Trace) -> list[int]:
    """The number of each request's conversation, recognised as the store does it."""
    found: list[int] = []
    conversations, numbers, last = Conversations(), count(), dict[object, int]()
    for request, arrival_s in zip(trace.requests, nominal_arrivals(trace), strict=True):
        one = conversations.arrive(request.chain, arrival_s)
        conversations.end_request(one, request.chain, arrival_s)
        if request.after >= 0:
            found.append(found[request.after])
        else:
            found.append(last[one] if one in last else next(numbers))
        last[one] = found[-1]
    return found


def part_of(trace: Trace, sessions: Sequence[int], num_parts: int, most: int) -> tuple[Trace, list[int]]:
    """The part of the trace that belongs to `num_parts` of `most` servers."""
    kept = [index for index, session in enumerate(sessions) if session % most < num_parts]
    places = {index: place for place, index in enumerate(kept)}
    requests = [trace.requests[index] for index in kept]
    requests = [one if one.after < 0 else replace(one, after=places[one.after]) for one in requests]
    return replace(trace, requests=requests), [sessions[index] for index in kept]


class Router:
    """Which server of the fleet gets a turn. sessions: of each request of the trace.

    A simulated server stands for all whose numbers leave the same remainder.
    """

    def __init__(self, trace: Trace, sessions: Sequence[int], config: FleetConfig, servers: Sequence[Replay]) -> None:
        self._trace, self._sessions, self._config, self._servers = trace, sessions, config, servers
        self._rng = random.Random(config.seed)
        self._homes: dict[int, dict[int, None]] = {}  # of each session: servers that had it, the last one last

    def choose(self, index: int) -> int:
        session, num = self._sessions[index], self._config.num_servers
        if self._config.routing == "sticky":
            return random.Random(session).randrange(num)
        if self._config.routing == "random":
            return self._rng.randrange(num)
        homes = self._homes.setdefault(session, {})
        others = [self._rng.randrange(num) for _ in range(NUM_LOOKED_AT)]
        one = min([*reversed(homes), *others], key=lambda one: self._takes_s(index, one))
        homes.pop(one, None)
        homes[one] = None
        if len(homes) > MOST_KNOWN:
            del homes[next(iter(homes))]
        return one

    def _takes_s(self, index: int, one: int) -> float:
        """Estimated seconds to the first token there, from what a router knows: the queue, and what is to be
        computed.
        """
        server, request = self._servers[one % len(self._servers)], self._trace.requests[index]
        num_held = max(server.blocks.num_held(self.there(request, one)))
        num_tokens = request.num_tokens - num_held * self._trace.block_size
        return server.backlog_s + num_tokens / self._config.server.service.prefill_tokens_per_s

    def there(self, request: TraceRequest, one: int) -> TraceRequest:
        """The request with the block names of this server. All servers that one stands for have blocks of their own,
        except for what conversations have in common.
        """
        offset = one // len(self._servers) * STANDS_FOR
        if not offset:
            return request
        return replace(request, chain=[name + offset if name >= 0 else name for name in request.chain])


class PaperFleet:
    """One run of a trace. Use once."""

    def __init__(self, trace: Trace, config: FleetConfig, progress: Callable[[int], None] | None = None) -> None:
        self._config, self._clock = config, VirtualClock()
        num = config.num_simulated
        self._trace, sessions = part_of(trace, sessions_of(trace), num, max(config.sample, num))
        if not self._trace.requests:
            raise ConfigError("too few conversations for so many servers; give a longer trace")
        self._line = Timeline(self._trace, self._clock, self._arrive, progress)
        beside = Beside(self._clock, self._ended, self._count)
        self.servers = [Replay(self._trace, config.server, beside=beside) for _ in range(num)]
        self._router = Router(self._trace, sessions, config, self.servers)
        self._shared = SharedTier(config, self._clock, num)
        self._sent: dict[int, int] = {}  # of each request that is being served: which server has it
        self._window_s = (math.inf, math.inf)  # after the restart
        self.all, self.restarted, self.others = Counted(), Counted(), Counted()

    def run(self) -> dict[str, object]:
        times = nominal_arrivals(self._trace)
        if self._config.restarts:
            self._window_s = (max(times) / 2, max(times) * 0.6)
            self._clock.at(self._window_s[0], self._restart)
        self._line.run()
        return self._result(max(times) - min(times))

    def _restart(self, _: object) -> None:
        for server in self.servers[: self._num_restarted]:
            server.restart(self._config.keeps_disk)

    @property
    def _num_restarted(self) -> int:
        return -(-len(self.servers) // 10)

    # -- a request ---------------------------------------------------------------------------------------------------
    def _arrive(self, index: int, number: int) -> None:
        if number == self._config.server.warm_up:
            for server in self.servers:
                server.begin_to_count()
        one, now_s, request = self._router.choose(index), self._clock.now_s, self._trace.requests[index]
        self._sent[index] = one
        place = one % len(self.servers)
        server, there = self.servers[place], self._router.there(request, one)
        first, num_blocks = self._readable(request, there, place)
        if not num_blocks:
            server.arrive(index, number, Arrived(there, now_s, range(0)))
            return

        def landed(_: object) -> None:
            end = first + server.blocks.land(there, first, first + num_blocks)
            server.arrive(index, number, Arrived(there, now_s, range(first, end)))

        self._clock.at(now_s + self._shared.read(place, num_blocks), landed)

    def _readable(self, request: TraceRequest, there: TraceRequest, place: int) -> tuple[int, int]:
        """The blocks worth reading from the shared tier, after those that are here: the first, and how many."""
        in_hbm, below = self.servers[place].blocks.num_held(there)
        chain = prompt_of(request, self._trace.block_size)
        most = (request.num_tokens - 1) // self._trace.block_size
        num_blocks = 0 if in_hbm > below else self._shared.num_stored(chain, below, most)
        read_s = self._shared.read_s(place, num_blocks)
        compute_s = num_blocks * self._trace.block_size / self._config.server.service.prefill_tokens_per_s
        return below, num_blocks if read_s - compute_s <= max(LEAST_SAVING_S, LEAST_SHARE * read_s) else 0

    def _count(self, job: Job, tiers: Sequence[str], ttft_s: float) -> None:
        size = self._trace.block_size
        hits = Counter({tier: number * size for tier, number in Counter(tiers).items()})
        self.all.add(job.request.num_tokens, hits, ttft_s)
        if self._window_s[0] <= job.arrived_s < self._window_s[1]:
            is_restarted = self._sent[job.index] % len(self.servers) < self._num_restarted
            (self.restarted if is_restarted else self.others).add(job.request.num_tokens, hits, ttft_s)

    def _ended(self, index: int) -> None:
        self._shared.write(chain_of(self._trace.requests[index]), self._sent.pop(index) % len(self.servers))
        self._line.ended(index)

    # -- the answer --------------------------------------------------------------------------------------------------
    def _result(self, duration_s: float) -> dict[str, object]:
        factor = self._config.num_servers / len(self.servers) / max(duration_s, 1e-9)
        share = len(self.servers) / self._config.num_servers
        num_dropped = self._shared.num_dropped
        read, written = self._shared.reads.num_bytes, self._shared.writes.num_bytes
        busy = max(read, written) * factor / self._config.num_servers
        saturating = self._config.remote_bytes_per_s / busy if busy else None
        found: dict[str, object] = {
            "servers": self._config.num_servers,
            "simulated_servers": len(self.servers),
            "routing": self._config.routing,
            **self.all.as_dict(),
            "remote_read_bytes_per_s": read * factor,
            "remote_write_bytes_per_s": written * factor,
            "saturating_servers": saturating,
            "remote_load": max(read, written) / (self._config.remote_bytes_per_s * share) / max(duration_s, 1e-9),
            "dropped_write_share": num_dropped / max(num_dropped + self._shared.num_written, 1),
        }  # fmt: skip
        if self._config.restarts:
            found["after_restart"] = {"restarted": self.restarted.as_dict(), "others": self.others.as_dict()}
        return found
