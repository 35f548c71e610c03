"""The parts of bench.gpu that need a model: prefill, decode, returning turns, overlap, the cost of saving, graphs."""

import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.common import alternate, median, random_prompts
from bench.gpu.case import (
    BLOCK_SIZE,
    DECODE,
    OVERLAP,
    PREFILL,
    SAVING,
    Board,
    Case,
    Clock,
    Goal,
    Weights,
    memory_bytes_per_s,
    release_memory,
    timed_s,
)
from bench.throughput import Ours
from bench.ttft import DECODE_PROMPT_TOKENS, DECODE_TOKENS, Person, decode_s, prefill_s
from kvstore.blocks.ids import BlockId, extend_chain
from kvstore.kernels.kv import BlockLoad

IDENTITY_TOKENS, IDENTITY_SEED = 1024, 99
SAVED_BATCHES = (1, 8)
LONG_TOKENS, LONG_REPEATS = 32768, 3


@dataclass(slots=True)
class Machine:
    """One model on one device, and its engines. Each is made when it is first needed.

    "plain": only HBM; "tiers": all three; "eager": as plain, but without CUDA graphs.
    """

    case: Case
    device: torch.device
    weights: Weights
    store: Path
    board: Board
    clock: Clock
    engines: dict[str, Any] = field(default_factory=dict)
    salts: Any = field(default_factory=itertools.count)  # one for all people: the same salt twice would hit

    def engine(self, kind: str) -> Any:
        from kvstore import Engine

        if kind not in self.engines:
            case, started = self.case, time.monotonic()
            self.clock.say(f"{case.name}: making the engine {kind!r}")
            tiers: dict[str, object] = {"hbm": case.hbm}
            if kind == "tiers":
                tiers |= {"cpu": case.cpu, "disk": case.disk, "path": self.store}
            options: dict[str, Any] = {"enforce_eager": True} if kind == "eager" else {}
            made = Engine(
                self.weights.folder,
                tiers,
                device=self.device.type,
                dtype="bfloat16",
                block_size=BLOCK_SIZE,
                max_model_len=case.window,
                max_num_batched_tokens=case.step_tokens,
                load="always",
                **options,
            )
            self.engines[kind] = made
            self.clock.say(f"{case.name}: {kind!r} is there after {time.monotonic() - started:.1f} s")
        return self.engines[kind]

    def person(self, kind: str, history_tokens: int, new_tokens: int | None = None) -> Person:
        history = random_prompts(1, history_tokens, self.case.shape.vocab_size, seed=history_tokens)[0]
        rng = random.Random(time.monotonic_ns())
        num_new = self.case.new_tokens if new_tokens is None else new_tokens
        return Person(self.engine(kind), history, num_new, rng, self.salts)

    def alternate(self, measures: Mapping[str, Callable[[], float]], num_tokens: int = 0) -> dict[str, list[float]]:
        """num_tokens: of one turn. Long turns are measured less often."""
        timely = {name: self.clock.timely(measure) for name, measure in measures.items()}
        repeats = self.case.repeats
        return alternate(timely, min(repeats, LONG_REPEATS) if num_tokens >= LONG_TOKENS else repeats)

    def close(self, kind: str) -> None:
        if kind in self.engines:
            self.engines.pop(kind).close()
            release_memory(self.device)

    def close_all(self) -> None:
        for kind in list(self.engines):
            self.close(kind)


# -- prefill ---------------------------------------------------------------------------------------------------------
def prefill(machine: Machine) -> None:
    """Whole prompts beside the unmodified model's forward with its fastest attention."""
    case, board, device = machine.case, machine.board, machine.device
    ours = Ours(machine.engine("plain"), case.shape.vocab_size)
    peer, attention = load_peer(machine.weights.folder, device)
    for num_tokens in case.prefills:
        prompts = random_prompts(1, num_tokens, case.shape.vocab_size, seed=num_tokens + 1)
        measures = {
            "ours": partial(ours.generate_s, prompts, 1),
            "transformers": partial(peer_prefill_s, peer, prompts[0], device),
        }
        times = machine.alternate(measures)
        ours_s, peer_s = median(times["ours"]), median(times["transformers"])
        name = f"{num_tokens:,} tokens"
        board.add(
            "prefill", case.name, f"{name}, ours", num_tokens / ours_s, "tok/s", peer_s / ours_s, "transformers",
            PREFILL, times["ours"],
        )  # fmt: skip
        note = f"attention: {attention}"
        board.add(
            "prefill", case.name, f"{name}, transformers", num_tokens / peer_s, "tok/s",
            times=times["transformers"], note=note,
        )  # fmt: skip


def load_peer(folder: Path, device: torch.device) -> tuple[Any, str]:
    """The model as transformers makes it, and the attention that it uses."""
    from transformers import AutoModelForCausalLM

    names = ["flash_attention_2", "sdpa"] if device.type == "cuda" and find_spec("flash_attn") else ["sdpa"]
    for name in names:
        try:
            made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=name)
            return made.to(device).eval(), name
        except (ImportError, ValueError, RuntimeError):  # a flash-attn that does not fit this torch
            if name == names[-1]:
                raise
    raise AssertionError("unreachable")


def peer_prefill_s(peer: Any, prompt: list[int], device: torch.device) -> float:
    """One forward with its own cache. Computes only the logits of the last token, as an engine does."""
    ids = torch.tensor([prompt], device=device)
    with torch.inference_mode():
        return timed_s(device, lambda: int(peer(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()))


# -- decode ----------------------------------------------------------------------------------------------------------
def decode(machine: Machine) -> None:
    """Tokens per second, relative to the limit that reading weights and KV in every step sets."""
    case, board = machine.case, machine.board
    machine.engine("plain")
    bytes_per_s = memory_bytes_per_s(machine.device)
    board.add("decode", case.name, "the device's memory, a copy within it", bytes_per_s / 1e9, "GB/s")
    person = machine.person("plain", 0)
    for batch in case.batches:
        replays = Replays(person.engine)
        times = machine.alternate({"decode": partial(decode_s, person, batch)})["decode"]
        rate, limit = batch * DECODE_TOKENS / median(times), decode_limit(case, machine.weights, batch, bytes_per_s)
        board.add(
            "decode", case.name, f"batch {batch}", rate, "tok/s", rate / limit, "the memory's limit",
            DECODE if batch == 1 else None, times, f"limit {limit:,.0f} tok/s; {replays}",
        )  # fmt: skip


def decode_limit(case: Case, weights: Weights, batch: int, bytes_per_s: float) -> float:
    """Tokens per second if a step took as long as reading the weights once and the KV of all its requests."""
    context_tokens = batch * (DECODE_PROMPT_TOKENS + DECODE_TOKENS / 2)
    step_bytes = weights.step_bytes + context_tokens * case.kv_bytes_per_token
    return batch * bytes_per_s / step_bytes


class Replays:
    """Counts how many of an engine's steps from now on are replays of a CUDA graph."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        step = self._engine.stats()["step"]
        return step["num_replays"], step["num_steps"]

    def __str__(self) -> str:
        replays, steps = (now - before for now, before in zip(self._counts(), self._before, strict=True))
        return f"{replays:,} of {steps:,} steps replayed a graph"


def graphs(machine: Machine) -> None:
    """Decode, and a short turn after a hit in HBM, with CUDA graphs beside the same without."""
    case, board = machine.case, machine.board
    machine.close("tiers")  # room for one engine more
    with_graphs, eager = machine.person("plain", 0), machine.person("eager", 0)
    for batch in case.batches:
        measures = {
            "with": partial(decode_s, with_graphs, batch),
            "without": partial(decode_s, eager, batch),
        }
        counts = {"with": Replays(with_graphs.engine), "without": Replays(eager.engine)}
        times = machine.alternate(measures)
        for kind, seconds in times.items():
            ratio = median(times["without"]) / median(seconds) if kind == "with" else None
            board.add(
                "graphs", case.name, f"decode, batch {batch}, {kind} graphs", batch * DECODE_TOKENS / median(seconds),
                "tok/s", ratio, "without graphs" if ratio else None, times=seconds, note=str(counts[kind]),
            )  # fmt: skip
    compare_turns(machine)
    machine.close("eager")


def compare_turns(machine: Machine) -> None:
    case, length = machine.case, machine.case.histories[0]
    persons = {"with": machine.person("plain", length), "without": machine.person("eager", length)}
    counts = {kind: Replays(person.engine) for kind, person in persons.items()}
    times = machine.alternate({kind: partial(person.hit_s, "hbm") for kind, person in persons.items()})
    for kind, seconds in times.items():
        ratio = median(times["without"]) / median(seconds) if kind == "with" else None
        machine.board.add(
            "graphs", case.name, f"turn of {case.new_tokens} tokens after an HBM hit, {kind} graphs",
            1000 * median(seconds), "ms", ratio, "without graphs" if ratio else None, times=seconds,
            note=str(counts[kind]),
        )  # fmt: skip


# -- returning turns -------------------------------------------------------------------------------------------------
def ttft(machine: Machine) -> None:
    """The first token of a turn, by the tier that holds its history."""
    case, board = machine.case, machine.board
    check_identity(machine)
    for history_tokens in case.histories:
        tiered, plain = machine.person("tiers", history_tokens), machine.person("plain", history_tokens)
        measures: dict[str, Callable[[], float]] = {
            "history recomputed": plain.cold_s,
            "HBM hit": partial(tiered.hit_s, "hbm"),
            "CPU hit": partial(tiered.hit_s, "cpu"),
            "disk hit, page cache warm": partial(tiered.hit_s, "disk"),
        }
        machine.clock.say(f"{case.name}: TTFT with {history_tokens:,} tokens of history")
        times = machine.alternate(measures, history_tokens)
        recompute_s = median(times["history recomputed"])
        for name, seconds in times.items():
            is_hit = name != "history recomputed"
            board.add(
                "ttft", case.name, f"{history_tokens:,} + {case.new_tokens} tokens, {name}", 1000 * median(seconds),
                "ms", recompute_s / median(seconds) if is_hit else None, "recompute" if is_hit else None,
                times=seconds,
            )  # fmt: skip


def check_identity(machine: Machine) -> None:
    """Check that blocks from the CPU and from disk equal the computed ones, bit for bit, in every layer."""
    num_tokens = min(IDENTITY_TOKENS, max(machine.case.histories))
    person = machine.person("tiers", num_tokens)
    person.history = random_prompts(1, num_tokens, machine.case.shape.vocab_size, seed=IDENTITY_SEED)[0]
    person.turn_s("any")
    computed = kv_of(person)
    for tier in ("cpu", "disk"):
        person.hit_s(tier)
        pairs = zip(computed, kv_of(person), strict=True)
        wrong = sum(not torch.equal(one, other) for one, other in pairs)
        what = f"{wrong} of {len(computed)} caches differ from what was computed" if wrong else None
        note = f"{num_tokens:,} tokens, every layer, bit for bit"
        machine.board.check("ttft", machine.case.name, f"KV back from {tier}", what, note)


def kv_of(person: Person) -> list[torch.Tensor]:
    """Keys and values of the history as they are in HBM, one tensor for each cache."""
    engine, chain = person.engine, list[BlockId]()
    extend_chain(chain, engine.facts.root(""), person.history, engine.facts.block_size)

    def copies() -> list[torch.Tensor]:
        numbers = [engine.loop.pool.lookup(block_id) for block_id in chain]
        if not chain or None in numbers:
            raise RuntimeError("the history is not in HBM")
        caches = [cache for layer in engine.loop.runner.caches for cache in layer]
        at = torch.tensor(numbers, device=caches[0].device)
        return [cache.index_select(0, at) for cache in caches]

    return engine.loop.call(copies)


def overlap(machine: Machine) -> None:
    """A CPU hit, relative to the longer of its parts: only loading its KV, and only computing with KV in HBM."""
    case, board = machine.case, machine.board
    for history_tokens, new_tokens in case.overlaps:
        person = machine.person("tiers", history_tokens, new_tokens)
        num_blocks = history_tokens // BLOCK_SIZE
        measures = {
            "CPU hit": partial(person.hit_s, "cpu"),
            "compute": partial(person.hit_s, "hbm"),
            "load": partial(load_alone_s, person.engine, num_blocks),
        }
        times = machine.alternate(measures, history_tokens)
        hit_s, compute_s, load_s = (median(times[name]) for name in ("CPU hit", "compute", "load"))
        longer = "load" if load_s > compute_s else "compute"
        board.add(
            "overlap", case.name, f"{history_tokens:,} + {new_tokens:,} tokens, CPU hit", 1000 * hit_s, "ms",
            hit_s / max(load_s, compute_s), f"{longer} alone", OVERLAP, times["CPU hit"],
            f"load alone {1000 * load_s:.2f} ms, compute alone (an HBM hit) {1000 * compute_s:.2f} ms",
        )  # fmt: skip


def load_alone_s(engine: Any, num_blocks: int) -> float:
    """The seconds of loading as many blocks from the engine's arena to its caches while nothing computes."""

    @torch.inference_mode()
    def load() -> float:
        engine.loop.pool.evict_all()  # so that nobody refers to the overwritten blocks
        arena, caches = engine.connector.parts.arena, engine.loop.runner.caches
        numbers = torch.arange(num_blocks)
        device = caches[0][0].device

        def work() -> None:
            load = BlockLoad(arena.layers, numbers, numbers, numbers * BLOCK_SIZE, arena.layout.rotations)
            load.load_layers(0, caches)

        return timed_s(device, work)

    return engine.loop.call(load)


# -- the cost of saving ----------------------------------------------------------------------------------------------
def saving(machine: Machine) -> None:
    """Prefill and decode with all tiers, relative to HBM alone. Remaining writes are flushed unmeasured."""
    length = machine.case.prefills[-1]
    tiered, plain = machine.person("tiers", length), machine.person("plain", length)
    _cost(machine, f"prefill {length:,}", tiered, plain, partial(prefill_s, num_prompts=1), length, SAVING)
    for batch in SAVED_BATCHES:
        measure = partial(decode_s, batch=batch)
        _cost(machine, f"decode, batch {batch}", tiered, plain, measure, batch * DECODE_TOKENS, SAVING)


def _cost(
    machine: Machine,
    name: str,
    tiered: Person,
    plain: Person,
    measure: Callable[[Person], float],
    num_tokens: int,
    goal: Goal,
) -> None:
    def saved() -> float:
        seconds = measure(tiered)
        tiered.engine.flush()
        return seconds

    dropped = num_dropped(tiered.engine)
    times = machine.alternate({"with": saved, "without": lambda: measure(plain)})
    dropped = num_dropped(tiered.engine) - dropped
    with_s, without_s = median(times["with"]), median(times["without"])
    note = f"{dropped:,} blocks were dropped instead of saved: this is not the whole cost" if dropped else None
    for kind, seconds in times.items():
        is_with = kind == "with"
        machine.board.add(
            "saving", machine.case.name, f"{name}, {kind} saving", num_tokens / median(seconds), "tok/s",
            with_s / without_s if is_with else None, "time without" if is_with else None,
            goal if is_with else None, seconds, note if is_with else None,
        )  # fmt: skip


def num_dropped(engine: Any) -> int:
    return int(engine.stats()["store"]["dropped_saves"])
