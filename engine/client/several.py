"""Several cores as one. Chooses which of them computes a request; a table says where each verb goes.

Knows no HTTP and no tensor.
"""

from __future__ import annotations

import selectors
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

from kvstore.blocks.ids import BlockId, extend_chain
from kvstore.blocks.records import Evicted
from kvstore.engine.client.affinity import Whereabouts
from kvstore.engine.client.core import State
from kvstore.engine.client.messages import (
    Call,
    CompactBlocks,
    EvictBlocks,
    Facts,
    Flush,
    Forget,
    Pin,
    Prefetch,
    ReadStats,
    Splice,
    Submit,
    VerifyBlocks,
)
from kvstore.engine.client.remote import RemoteCore
from kvstore.engine.client.totals import total_stats
from kvstore.engine.core.news import Update
from kvstore.errors import EngineClosedError, EngineDiedError, EngineOverloadedError
from kvstore.owned_disk import OwnedDisk

SILENT_S = 10.0  # without a sign of life: it gets no new request, and nobody waits for it who need not
LOOK_S = 0.25  # how often to look whether it still gives signs
MAX_HINTS = 8  # calls at once that need not be done; the others wait
ORDER: tuple[State, ...] = ("running", "starting", "restarting", "failed", "closed")  # the best state is that of all
R = TypeVar("R")


class CoreReplica:
    """One of the engines. rank: its number among them."""

    def __init__(self, rank: int, core: RemoteCore) -> None:
        self.rank, self.core = rank, core
        self._threads = ThreadPoolExecutor(MAX_HINTS, f"engine-{rank}")

    @property
    def is_running(self) -> bool:
        return self.core.state == "running"

    def answers(self) -> bool:
        """Whether it runs and gives signs of life."""
        return self.is_running and self.core.silent_s < SILENT_S

    def briefly(self, verb: Call[R]) -> R | None:
        """Call it, and wait for the result as long as it gives signs of life; None if it does not."""
        if not self.answers():
            return None
        result = self._threads.submit(self.core.call, verb)
        while self.answers():
            try:
                return result.result(LOOK_S)
            except TimeoutError:
                continue
            except (EngineDiedError, EngineOverloadedError):
                return None
        result.cancel()
        return None

    def stats(self) -> dict[str, Any]:
        """The engine's, or only those of its process if that does not answer."""
        found = self.briefly(ReadStats())
        if found is not None:
            return {"rank": self.rank, **found}
        process = self.core.process
        return {"rank": self.rank, "process": {**process, "state": "silent"} if self.is_running else process}

    def close(self) -> None:
        self.core.close()
        self._threads.shutdown(wait=False)


class SeveralCores:
    """A `Core`. replicas: the engines, all of them ready. disk: that they share; None without a disk tier. most_ahead:
    how many requests an engine may have more than another before its conversations go there.

    An engine that has ended, and is started again, has nothing in its memory: what goes to all passes it over. It knows
    no more of pins than the disk does.
    """

    life = 0  # what is known of a conversation outlives an engine's process

    def __init__(self, replicas: Sequence[CoreReplica], disk: OwnedDisk | None, most_ahead: int) -> None:
        self.replicas, self._disk = tuple(replicas), disk
        facts = [one.core.facts for one in replicas]
        self.facts: Facts = replace(facts[0], max_request_tokens=min(one.max_request_tokens for one in facts))
        self._most_ahead = most_ahead
        self._affinity, self._num_sent = Whereabouts(), Counter[int]()  # requests, by rank
        self._routing = threading.Lock()  # the event loop may wait for it, so nothing is hashed under it
        self._sent: dict[str, CoreReplica] = {}  # running requests, by id
        self._selector = selectors.DefaultSelector()
        for one in replicas:
            self._selector.register(one.core, selectors.EVENT_READ)
        weakref.finalize(self, self._selector.close)

    @property
    def state(self) -> State:
        """That of the engine that is best off."""
        return min((one.core.state for one in self.replicas), key=ORDER.index)

    @property
    def pid(self) -> int | None:
        """There are several."""
        return None

    @property
    def silent_s(self) -> float:
        """For how long none of the running processes has given a sign of life."""
        return min((one.core.silent_s for one in self.replicas if one.is_running), default=0.0)

    def check_open(self) -> None:
        if not any(one.is_running for one in self.replicas):
            self.replicas[0].core.check_open()

    def close(self) -> None:
        """Close all at once, as each may take a while."""
        closing = [threading.Thread(target=one.close, name="engine-close") for one in self.replicas[1:]]
        with suppress(RuntimeError):  # at its exit Python may start no thread: then one after the other
            for thread in closing:
                thread.start()
        for one in self.replicas:
            one.close()
        for thread in closing:
            if thread.is_alive():
                thread.join()

    # -- requests and their news -------------------------------------------------------------------------------------
    def submit(self, prompts: Sequence[Submit]) -> None:
        for prompt in prompts:
            chain = list(prompt.chain)
            extend_chain(chain, prompt.lineage.root, prompt.token_ids, self.facts.block_size)
            replica, _ = self._first_of(chain, lambda one: self._send(one, prompt))  # noqa: B023 (called here only)
            self._note(chain, replica.rank, is_request=True)

    def _order(self, chain: Sequence[BlockId]) -> list[CoreReplica]:
        """Those that answer, the best for this chain first. All, if none does."""
        with self._routing:
            last = self._affinity.engine_of(chain)
            found = [one for one in self.replicas if one.answers()] or list(self.replicas)
            found.sort(key=lambda one: (one.core.num_requests, self._num_sent[one.rank]))
            least = found[0].core.num_requests
            found.sort(key=lambda one: one.rank != last or one.core.num_requests >= least + self._most_ahead)
            return found

    def _note(self, chain: Sequence[BlockId], rank: int, is_request: bool = False) -> None:
        """This engine has the chain, or is about to compute it."""
        with self._routing:
            self._affinity.note(chain, rank)
            self._num_sent[rank] += is_request

    def _send(self, replica: CoreReplica, prompt: Submit) -> None:
        self._sent[prompt.request_id] = replica  # first, as its news may come at once
        try:
            replica.core.submit([prompt])
        except Exception:
            del self._sent[prompt.request_id]
            raise

    def _first_of(self, chain: Sequence[BlockId], use: Callable[[CoreReplica], R]) -> tuple[CoreReplica, R]:
        """Use the first for this chain that has not ended. Raises what the last one raises, if all have."""
        order = self._order(chain)
        for one in order[:-1]:
            with suppress(EngineDiedError):
                return one, use(one)
        return order[-1], use(order[-1])

    def end(self, request_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        if (replica := self._sent.get(request_id)) is not None:
            replica.core.end(request_id, index, stop_string)

    def take_news(self) -> list[Update]:
        updates = [update for one in self.replicas for update in one.core.take_news()]
        for update in updates:
            if update.ended is not None and (replica := self._sent.pop(update.request_id, None)) is not None:
                # Behind a stop string comes a token that is no part of the conversation.
                is_cut = any(said.token_id is None and said.finish_reason == "stop" for said in update.said)
                chain = update.ended.chain
                self._note(chain[: len(chain) - is_cut], replica.rank)
        return updates

    @property
    def on_news(self) -> Callable[[], None]:
        return self.replicas[0].core.on_news

    @on_news.setter
    def on_news(self, function: Callable[[], None]) -> None:
        for one in self.replicas:
            one.core.on_news = function

    @property
    def is_reader(self) -> bool:
        return any(one.core.is_reader for one in self.replicas)

    def fileno(self) -> int:
        return self._selector.fileno()

    def read_here(self) -> bool:
        for one in self.replicas:
            one.core.read_here()
        return True

    # -- verbs -------------------------------------------------------------------------------------------------------
    def call(self, verb: Call[R]) -> R:
        return cast(R, WAYS[type(verb)](self, verb))

    def _where_it_was(self, verb: Splice | Prefetch) -> Any:
        """At the engine that has the conversation, and that then has what comes of it."""
        replica, made = self._first_of(verb.chain, lambda one: one.core.call(cast(Call[Any], verb)))
        if isinstance(verb, Prefetch):
            self._note(verb.chain, replica.rank)
        elif made is not None:
            self._note(made[0], replica.rank)
        return made

    def _all(self, verb: Call[R]) -> list[R]:
        """What all say that run. Passes over those that end meanwhile."""
        results = []
        for one in self.replicas:
            if one.is_running:
                with suppress(EngineDiedError):
                    results.append(one.core.call(verb))
        return results

    def _pin(self, verb: Pin) -> None:
        for one in self.replicas:
            one.briefly(verb)
        if self._disk is not None:
            self._disk.pin(verb.chain, verb.seconds, verb.expires_s)

    def _forget(self, verb: Forget) -> bool:
        are_gone = self._all(verb)
        return all(are_gone) and (self._disk is None or self._disk.forget(verb.block_ids, verb.timeout_s))

    def _evict(self, verb: EvictBlocks) -> dict[str, Evicted]:
        """to_bytes: of a tier of all engines together; each keeps the same part."""
        what = verb.what
        part = what if what.to_bytes is None else replace(what, to_bytes=what.to_bytes // len(self.replicas))
        found = {"hbm": Evicted(), "cpu": Evicted()}
        for tiers in self._all(EvictBlocks(part)):
            for tier, evicted in tiers.items():
                before = found.get(tier, Evicted())
                found[tier] = Evicted(before.num_blocks + evicted.num_blocks, before.num_bytes + evicted.num_bytes)
        return found if self._disk is None else {**found, "disk": self._disk.evict(what)}

    def _flush(self, verb: Flush) -> int:
        self.check_open()
        num_shared = self._all(verb)
        if self._disk is not None:
            self._disk.flush()
        return max(num_shared, default=0)

    def _stats(self, _: ReadStats) -> dict[str, Any]:
        """Totals of the engines that answer; `replicas`: the counters of each."""
        self.check_open()
        each = [one.stats() for one in self.replicas]
        answering = [{name: part for name, part in one.items() if name != "rank"} for one in each if "hbm" in one]
        if not answering:
            raise EngineClosedError("no engine answers at the moment")
        found = total_stats(answering, None if self._disk is None else self._disk.stats())
        processes = [one["process"] for one in each]
        found["process"] = {
            "state": next((one["state"] for one in processes if one["state"] != "running"), "running"),
            "pid": None,
            "restarts": sum(one["restarts"] for one in processes),
            "requests": sum(one["requests"] for one in processes),
        }
        return {**found, "replicas": each}

    def _verify(self, verb: VerifyBlocks) -> dict[str, object]:
        return {} if self._disk is None else self._disk.verify(verb.delete)

    def _compact(self, _: CompactBlocks) -> dict[str, object]:
        return {} if self._disk is None else self._disk.compact()


WAYS: dict[type[Call[Any]], Callable[[SeveralCores, Any], Any]] = {
    Splice: SeveralCores._where_it_was,
    Prefetch: SeveralCores._where_it_was,
    Pin: SeveralCores._pin,
    Forget: SeveralCores._forget,
    EvictBlocks: SeveralCores._evict,
    VerifyBlocks: SeveralCores._verify,
    CompactBlocks: SeveralCores._compact,
    Flush: SeveralCores._flush,
    ReadStats: SeveralCores._stats,
}
