"""How large tiers should be: what a trace needs, which sizes to try, and where larger ones bring little.

Numbers only: replays nothing, prints nothing.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.errors import ConfigError
from kvstore.planning.replay_config import ServiceModel
from kvstore.planning.traces import ANSWER_TOKENS_PER_S, Trace, chain_names
from kvstore.policy.conversation import Conversations

KV_BYTES_PER_TOKEN = {  # 2 (K and V) x layers x KV heads x head size x 2 bytes
    "llama-13b": 819_200,
    "llama-7b": 524_288,
    "llama-3.1-70b": 327_680,
    "llama-3.1-8b": 131_072,
    "qwen3-8b": 147_456,
    "qwen3-0.6b": 114_688,
}
SWEEP_STEPS = 6  # halvings of the working set
CPU_SHARE = 8  # a sweep's CPU tier is one part of the disk tier in so many
SENSITIVITY = 1.0  # of Kneedle; its authors' choice for a curve that is known as a whole
FLAT = 0.005  # hit rates that differ by less are the same


# -- what a trace asks for -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Extent:
    """working_set_blocks: distinct full blocks of prompts and, where they are named, answers. largest_blocks: of one
    request. duration_s: from the first arrival to the last.
    """

    num_requests: int
    num_conversations: int
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    working_set_blocks: int
    largest_blocks: int

    @property
    def mean_tokens(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.num_requests


def extent(trace: Trace) -> Extent:
    """Measure a trace. As in the store, a chain that continues another's tip is the same conversation."""
    conversations, num_conversations = Conversations(), 0
    seen: set[int] = set()
    size, largest, times = trace.block_size, 0, nominal_arrivals(trace)
    for request, arrival_s in zip(trace.requests, times, strict=True):
        chain = request.chain
        num_conversations += request.after < 0 and conversations.conversation_of(chain) is None
        is_seen = bool(chain) and chain[-1] in seen
        conversation = conversations.arrive(chain, arrival_s, is_stored=is_seen)
        conversations.end_request(conversation, chain, arrival_s)
        for name in reversed(chain):
            if name in seen:  # then all before it were seen as well
                break
            seen.add(name)
        largest = max(largest, -(-(request.num_tokens + request.num_output_tokens) // size))
    return Extent(
        len(trace.requests), num_conversations, max(times) - min(times), sum(r.num_tokens for r in trace.requests),
        sum(r.num_output_tokens for r in trace.requests), len(seen), largest,
    )  # fmt: skip


def nominal_arrivals(trace: Trace) -> array[float]:
    """When each request would come if every answer took its nominal time."""
    found = array("d")
    for request in trace.requests:
        before_s = 0.0
        if request.after >= 0:
            before_s = found[request.after] + trace.requests[request.after].num_output_tokens / ANSWER_TOKENS_PER_S
        found.append(before_s + request.arrival_s)
    return found


def last_requests(trace: Trace, num_requests: int) -> Trace:
    """The end of a trace; a request whose predecessor is cut off comes at its nominal time."""
    first = max(len(trace.requests) - num_requests, 0)
    times, kept = nominal_arrivals(trace), []
    for index, request in enumerate(trace.requests[first:], first):
        if request.after >= first:
            request = replace(request, after=request.after - first)
        elif request.after >= 0:
            request = replace(request, after=-1, arrival_s=times[index])
        kept.append(request)
    return replace(trace, requests=kept)


def without_reuse(trace: Trace) -> Trace:
    """The same requests without any common blocks: what a server without a cache must compute."""
    requests = [
        replace(request, chain=chain_names(number, len(request.chain)), partial=None)
        for number, request in enumerate(trace.requests, 1)
    ]
    return replace(trace, requests=requests)


def load_of(demand: Extent, hit_rate: float, service: ServiceModel) -> float:
    """Work divided by the time available; above 1 the queue grows without end, and with it every TTFT. 0 where all
    requests came at once: then none follow.
    """
    compute_s = demand.num_prompt_tokens * (1 - hit_rate) / service.prefill_tokens_per_s
    decode_s = demand.num_output_tokens / service.decode_tokens_per_s / service.max_batch
    return max(compute_s, decode_s) / demand.duration_s if demand.duration_s else 0.0


# -- which sizes to try ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the tiers in bytes; 0 for no such tier."""

    hbm: int
    cpu: int
    disk: int

    @property
    def total(self) -> int:
        return self.hbm + self.cpu + self.disk


@dataclass(frozen=True, slots=True)
class Geometry:
    """Bytes of one block of a trace in memory, on disk, where it may be compressed, and in HBM, where it may have KV of
    layers with a window.
    """

    block_bytes: int
    disk_block_bytes: int
    hbm_block_bytes: int

    def blocks(self, sizes: Sizes) -> tuple[int, int, int]:
        """Blocks that fit in HBM, CPU and disk. Raises ConfigError when HBM holds none."""
        if sizes.hbm < self.hbm_block_bytes:
            text = f"HBM of {sizes.hbm:,} bytes holds less than one block of {self.hbm_block_bytes:,} bytes"
            raise ConfigError(f"{text}; give more, or a smaller --block-size")
        return sizes.hbm // self.hbm_block_bytes, sizes.cpu // self.block_bytes, sizes.disk // self.disk_block_bytes


def batch_bytes(demand: Extent, block_size: int, block_bytes: int, max_batch: int) -> int:
    """The HBM that such requests need: a full batch of average ones, and at least two of the largest."""
    mean_blocks = -(-demand.mean_tokens // block_size)
    return block_bytes * max(math.ceil(mean_blocks * max_batch), 2 * demand.largest_blocks)


def sweep(working_set_bytes: int, hbm: int) -> list[Sizes]:
    """From HBM alone up to a disk that holds the working set, in powers of two; CPU is an eighth of the disk.

    Tiers are inclusive, so a disk smaller than HBM would add nothing and is left out. Never less than one with a disk.
    """
    top = 1 << max(working_set_bytes - 1, 1).bit_length()
    disks = [disk for step in range(SWEEP_STEPS, 0, -1) if (disk := top >> step) > hbm]
    return [Sizes(hbm, 0, 0), *(Sizes(hbm, disk // CPU_SHARE, disk) for disk in (*disks, top))]


# -- where more brings little ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Point:
    capacity: int
    hit_rate: float


def best_so_far(points: Sequence[Point]) -> list[Point]:
    """One point per capacity, in order: the best hit rate with at most this capacity."""
    best: dict[int, float] = {}
    highest = -math.inf
    for point in sorted(points, key=lambda point: (point.capacity, point.hit_rate)):
        highest = max(highest, point.hit_rate)
        best[point.capacity] = highest
    return [Point(capacity, hit_rate) for capacity, hit_rate in best.items()]


def knee(points: Sequence[Point]) -> Point | None:
    """Where a curve of hit rate over capacity bends: more capacity brings less than it did on average.

    Kneedle (Satopaa, Albrecht, Irwin, Raghavan: Finding a "Kneedle" in a Haystack, ICDCSW 2011) on capacity as it is,
    not on its logarithm, as memory is paid by the byte; without its smoothing, for a replay has no noise. Of several
    knees the clearest. None for fewer than three points, a flat curve, and one that rises about evenly.
    """
    curve = best_so_far(points)
    if len(curve) < 3 or curve[-1].hit_rate - curve[0].hit_rate < FLAT:
        return None
    distances = _above_the_diagonal(curve)
    needed = SENSITIVITY / (len(curve) - 1)  # the mean distance of two points
    found: tuple[float, Point] | None = None
    for index in range(1, len(curve) - 1):
        here = distances[index]
        if not distances[index - 1] < here >= distances[index + 1]:
            continue
        following = _until_higher(distances[index + 1 :], here)
        if min(following) < here - needed and (found is None or here > found[0]):
            found = here, curve[index]
    return None if found is None else found[1]


def _above_the_diagonal(curve: Sequence[Point]) -> list[float]:
    """How far each point is above the line from the first to the last, both scales being 0 to 1."""
    first, last = curve[0], curve[-1]
    width, height = last.capacity - first.capacity, last.hit_rate - first.hit_rate
    return [(one.hit_rate - first.hit_rate) / height - (one.capacity - first.capacity) / width for one in curve]


def _until_higher(distances: Sequence[float], limit: float) -> Sequence[float]:
    """The points before the curve rises above an earlier maximum again; at least one."""
    end = next((index for index, one in enumerate(distances) if one > limit), len(distances))
    return distances[: max(end, 1)]
