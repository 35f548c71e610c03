"""Several cores as one. Chooses which of them computes a request; a table says where each verb goes.

Knows no HTTP and no tensor.
"""

from __future__ import annotations

import selectors
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from kvstore.blocks.ids import BlockId, extend_chain
from kvstore.blocks.records import Evicted
from kvstore.engine.client import messages
from kvstore.engine.client.messages import Call, State, Submit
from kvstore.engine.client.remote import RemoteCore
from kvstore.engine.core.request import Update
from kvstore.engine.outputs import Facts
from kvstore.errors import EngineClosedError, EngineDiedError, EngineOverloadedError
from kvstore.owned_disk import OwnedDisk

MOST_BLOCKS = 1 << 18  # that are remembered: 4 million tokens in blocks of 16
SAME = {"block_bytes", "block_size", "bounds", "ranks_version", "state_blocks", "window_blocks"}  # in all engines
ORDER: tuple[State, ...] = ("running", "starting", "restarting", "failed", "closed")  # the best state is that of all
R = TypeVar("R")


@dataclass(slots=True)
class _Known:
    """A block. engine: the one that had it last. goes_on: some block builds on it. is_shared: several do, on it or on a
    block after it.
    """

    engine: int
    goes_on: bool = False
    is_shared: bool = False


class Whereabouts:
    """Chains of prompts and answers, each with its engine, and conversations that clients name: digests beside block
    ids. The least recently used are forgotten.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._known: OrderedDict[BlockId, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def engine_of(self, chain: Sequence[BlockId], conversation: bytes = b"") -> int | None:
        """The engine of the conversation that this chain continues, or else of the named one; None if it has none."""
        last = next((known for one in reversed(chain) if (known := self._known.get(one)) is not None), None)
        if last is None or last.is_shared:
            last = self._known.get(BlockId(conversation))
        return None if last is None else last.engine

    def note(self, chain: Sequence[BlockId], engine: int, conversation: bytes = b"") -> None:
        """This engine has the chain, or is about to compute it."""
        blocks = [self._known.get(one) for one in chain]
        num_known = next((i for i, known in enumerate(blocks) if known is None), len(chain))
        before = blocks[num_known - 1] if num_known else None
        if before is not None and before.goes_on and num_known < len(chain):  # another one goes on differently
            for known in blocks[:num_known]:
                if known is not None:
                    known.is_shared = True
        for index, (one, known) in enumerate(zip(chain, blocks, strict=True)):
            block = self._known.setdefault(one, _Known(engine)) if known is None else known
            block.engine = engine
            block.goes_on = block.goes_on or index < len(chain) - 1
        for one in reversed(chain):  # heads are forgotten last
            self._known.move_to_end(one)
        if conversation:
            self._known[BlockId(conversation)] = _Known(engine)
            self._known.move_to_end(BlockId(conversation))
        while len(self._known) > self._most_blocks:
            self._known.popitem(last=False)


def total(parts: Sequence[Any], name: str = "") -> Any:
    """The sum of numbers, item by item of lists and dicts. Of rates the mean, of texts the first, of flags any.

    None stands for what is not known, or not so.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    first = known[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for part in known for key in part)
        return {key: total([part.get(key) for part in known], str(key)) for key in keys}
    if isinstance(first, bool):
        return any(known)
    if name in SAME or isinstance(first, str):
        return first
    if isinstance(first, Sequence):
        return [total(items) for items in zip(*known, strict=True)]
    return sum(known) / len(known) if name.endswith("_per_s") else sum(known)


def total_stats(engines: Sequence[Mapping[str, Any]], disk: Mapping[str, Any] | None) -> dict[str, Any]:
    """Counters of all engines that answer, and of the disk that they share; None without one."""
    found: dict[str, Any] = total(engines)
    if disk is None:
        return found
    links = [remote for engine in engines if (remote := engine.get("remote"))]
    found.pop("remote", None)  # that is this disk
    found["store"] = total([found["store"], disk["store"]])
    found["disk"] = dict(disk["disk"])
    found["disk"]["degraded"] = total([disk["disk"].get("degraded"), *(link["degraded"] for link in links)])
    for figure in ("evictable", "in_force"):
        found["policy"][figure]["disk"] = disk["policy"][figure]["disk"]
    found["lost"] = disk["lost"]
    return found


class SeveralCores:
    """A `Core`. cores: the engines by rank, all of them ready. disk: that they share; None without a disk tier.
    most_ahead: how many requests an engine may have more than another before its conversations go there.

    An engine that has ended, and is started again, has nothing in its memory: what goes to all passes it over. It knows
    no more of pins than the disk does.
    """

    life = 0  # what is known of a conversation outlives an engine's process

    def __init__(self, cores: Sequence[RemoteCore], disk: OwnedDisk | None, most_ahead: int) -> None:
        self.cores, self._disk = tuple(cores), disk
        facts = [one.facts for one in cores]
        self.facts: Facts = replace(facts[0], max_request_tokens=min(one.max_request_tokens for one in facts))
        self._most_ahead = most_ahead
        self._affinity, self._num_sent = Whereabouts(), Counter[int]()  # requests, by rank
        self._routing = threading.Lock()  # the event loop may wait for it, so nothing is hashed under it
        self._sent: dict[str, int] = {}  # where requests run, by id
        self._selector = selectors.DefaultSelector()
        for one in cores:
            self._selector.register(one, selectors.EVENT_READ)
        weakref.finalize(self, self._selector.close)

    @property
    def state(self) -> State:
        """That of the engine that is best off."""
        return min((one.state for one in self.cores), key=ORDER.index)

    @property
    def pid(self) -> int | None:
        """There are several."""
        return None

    @property
    def silent_s(self) -> float:
        """For how long none of the running processes has given a sign of life."""
        return min((one.silent_s for one in self.cores if one.is_running), default=0.0)

    def check_open(self) -> None:
        if not any(one.is_running for one in self.cores):
            self.cores[0].check_open()

    def close(self) -> None:
        """Close all at once, as each may take a while."""
        closing = [threading.Thread(target=one.close, name="engine-close") for one in self.cores[1:]]
        with suppress(RuntimeError):  # at its exit Python may start no thread: then one after the other
            for thread in closing:
                thread.start()
        for one in self.cores:
            one.close()
        for thread in closing:
            if thread.is_alive():
                thread.join()

    # -- requests and their news -------------------------------------------------------------------------------------
    def submit(self, prompts: Sequence[Submit]) -> None:
        for prompt in prompts:
            chain = list(prompt.chain)
            extend_chain(chain, prompt.lineage.root, prompt.token_ids, self.facts.block_size)
            send = partial(self._send, prompt=prompt)
            rank, _ = self._first_of(chain, send, prompt.conversation)
            self._note(chain, rank, prompt.conversation, is_request=True)

    def _order(self, chain: Sequence[BlockId], conversation: bytes) -> list[int]:
        """Those that answer, the best for this chain first. All, if none does."""
        with self._routing:
            last, num_requests = self._affinity.engine_of(chain, conversation), [one.num_requests for one in self.cores]
            ranks = [rank for rank, one in enumerate(self.cores) if one.answers] or list(range(len(self.cores)))
            ranks.sort(key=lambda rank: (num_requests[rank], self._num_sent[rank]))
            least = num_requests[ranks[0]]
            ranks.sort(key=lambda rank: rank != last or num_requests[rank] >= least + self._most_ahead)
            return ranks

    def _note(self, chain: Sequence[BlockId], rank: int, conversation: bytes = b"", is_request: bool = False) -> None:
        """This engine has the chain, or is about to compute it."""
        with self._routing:
            self._affinity.note(chain, rank, conversation)
            self._num_sent[rank] += is_request

    def _send(self, rank: int, prompt: Submit) -> None:
        self._sent[prompt.request_id] = rank  # first, as its news may come at once
        try:
            self.cores[rank].submit([prompt])
        except Exception:
            del self._sent[prompt.request_id]
            raise

    def _first_of(self, chain: Sequence[BlockId], use: Callable[[int], R], conversation: bytes = b"") -> tuple[int, R]:
        """Use the first for this chain that has not ended. Raises what the last one raises, if all have."""
        *better, last = self._order(chain, conversation)
        for rank in better:
            with suppress(EngineDiedError):
                return rank, use(rank)
        return last, use(last)

    def end(self, request_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        if (rank := self._sent.get(request_id)) is not None:
            self.cores[rank].end(request_id, index, stop_string)

    def note_call(self, request_id: str, index: int) -> None:
        if (rank := self._sent.get(request_id)) is not None:
            self.cores[rank].note_call(request_id, index)

    def take_news(self) -> list[Update]:
        updates = [update for one in self.cores for update in one.take_news()]
        for update in updates:
            if update.ended is not None and (rank := self._sent.pop(update.request_id, None)) is not None:
                # Behind a stop string comes a token that is no part of the conversation.
                is_cut = any(said.token_id is None and said.finish_reason == "stop" for said in update.said)
                chain = update.ended.chain
                self._note(chain[: len(chain) - is_cut], rank)
        return updates

    @property
    def on_news(self) -> Callable[[], None]:
        return self.cores[0].on_news

    @on_news.setter
    def on_news(self, function: Callable[[], None]) -> None:
        for one in self.cores:
            one.on_news = function

    @property
    def is_reader(self) -> bool:
        return any(one.is_reader for one in self.cores)

    def fileno(self) -> int:
        return self._selector.fileno()

    def read_here(self) -> bool:
        for one in self.cores:
            one.read_here()
        return True

    # -- verbs -------------------------------------------------------------------------------------------------------
    def call(self, verb: Call[R]) -> R:
        return cast(R, WAYS[type(verb)](self, verb))

    def _where_it_was(self, verb: messages.Splice | messages.Prefetch) -> Any:
        """At the engine that has the conversation, and that then has what comes of it."""
        rank, made = self._first_of(verb.chain, lambda rank: self.cores[rank].call(cast(Call[Any], verb)))
        if isinstance(verb, messages.Prefetch):
            self._note(verb.chain, rank)
        elif made is not None:
            self._note(made[0], rank)
        return made

    def _all(self, verb: Call[R]) -> list[R]:
        """What all say that run. Passes over those that end meanwhile."""
        results = []
        for one in self.cores:
            if one.is_running:
                with suppress(EngineDiedError):
                    results.append(one.call(verb))
        return results

    def _pin(self, verb: messages.Pin) -> None:
        for one in self.cores:
            _briefly(one, verb)
        if self._disk is not None:
            self._disk.pin(verb.chain, verb.seconds, verb.expires_s, verb.tenant)

    def _unused(self, verb: messages.Unused) -> list[BlockId]:
        return list(set(verb.block_ids).intersection(*self._all(verb)))

    def _forget(self, verb: messages.Forget) -> bool:
        are_gone = self._all(verb)
        return all(are_gone) and (self._disk is None or self._disk.forget(verb.block_ids, verb.timeout_s))

    def _evict(self, verb: messages.EvictBlocks) -> dict[str, Evicted]:
        """to_bytes: of a tier of all engines together; each keeps the same part."""
        what = verb.what
        part = what if what.to_bytes is None else replace(what, to_bytes=what.to_bytes // len(self.cores))
        found = {"hbm": Evicted(), "cpu": Evicted()}
        for tiers in self._all(messages.EvictBlocks(part)):
            for tier, evicted in tiers.items():
                before = found.get(tier, Evicted())
                found[tier] = Evicted(before.num_blocks + evicted.num_blocks, before.num_bytes + evicted.num_bytes)
        return found if self._disk is None else {**found, **self._disk.upkeep.evict(what)[0]}

    def _flush(self, verb: messages.Flush) -> int:
        self.check_open()
        num_shared = self._all(verb)
        if self._disk is not None:
            self._disk.upkeep.flush()
        return max(num_shared, default=0)

    def _stats(self, _: messages.ReadStats) -> dict[str, Any]:
        """Totals of the engines that answer; `replicas`: the counters of each."""
        self.check_open()
        each = [_stats_of(rank, one) for rank, one in enumerate(self.cores)]
        answering = [{name: part for name, part in one.items() if name != "rank"} for one in each if "hbm" in one]
        if not answering:
            raise EngineClosedError("no engine answers at the moment")
        found = total_stats(answering, None if self._disk is None else self._disk.upkeep.stats())
        processes = [one["process"] for one in each]
        found["process"] = {
            "state": next((one["state"] for one in processes if one["state"] != "running"), "running"),
            "pid": None,
            "restarts": sum(one["restarts"] for one in processes),
            "requests": sum(one["requests"] for one in processes),
        }
        return {**found, "replicas": each}

    def _verify(self, verb: messages.VerifyBlocks) -> dict[str, object]:
        return {} if self._disk is None else self._disk.upkeep.verify(verb.delete)

    def _compact(self, verb: messages.CompactBlocks) -> dict[str, object]:
        return {} if self._disk is None else self._disk.upkeep.compact(verb.codec)


def _briefly(core: RemoteCore, verb: Call[R]) -> R | None:
    """Call it, and wait for the result as long as it gives signs of life; None if it does not."""
    if core.answers:
        with suppress(EngineDiedError, EngineOverloadedError):
            return core.call(verb, briefly=True)
    return None


def _stats_of(rank: int, core: RemoteCore) -> dict[str, Any]:
    """The engine's, or only those of its process if that does not answer."""
    if (found := _briefly(core, messages.ReadStats())) is not None:
        return {"rank": rank, **found}
    return {"rank": rank, "process": {**core.process, "state": "silent"} if core.is_running else core.process}


WAYS: dict[type[Call[Any]], Callable[[SeveralCores, Any], Any]] = {
    messages.Splice: SeveralCores._where_it_was,
    messages.Prefetch: SeveralCores._where_it_was,
    messages.Pin: SeveralCores._pin,
    messages.Unused: SeveralCores._unused,
    messages.Forget: SeveralCores._forget,
    messages.EvictBlocks: SeveralCores._evict,
    messages.VerifyBlocks: SeveralCores._verify,
    messages.CompactBlocks: SeveralCores._compact,
    messages.Flush: SeveralCores._flush,
    messages.ReadStats: SeveralCores._stats,
}
