"""DataParallelCore: several engines as one `Core`. Chooses which of them computes a request; the rest goes to all."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from kvstore.blocks.ids import BlockId, Lineage, lineage_root
from kvstore.blocks.records import Evict, Evicted
from kvstore.engine.core.output_processor import Handle, Listener
from kvstore.engine.data_parallel.affinity import Whereabouts
from kvstore.engine.data_parallel.totals import total_stats
from kvstore.engine.process.link import Link
from kvstore.engine.process.remote import RemoteCore
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.core import Facts, checked_request
from kvstore.engine.text.prompts import check_owner
from kvstore.errors import EngineClosedError, EngineDiedError, EngineOverloadedError

SILENT_S = 10.0  # without a sign of life: it gets no new request, and nobody waits for it who need not
LOOK_S = 0.25  # how often to look whether it still gives signs
MAX_HINTS = 8  # calls at once that need not be done; the others wait
R = TypeVar("R")


class SharedDisk(Protocol):
    """The disk of all engines: `kvstore.owned_disk.OwnedDisk`."""

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float) -> bool: ...

    def pin(self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None) -> None: ...

    def evict(self, what: Evict) -> Evicted: ...

    def verify(self, delete: bool) -> dict[str, object]: ...

    def compact(self) -> dict[str, object]: ...

    def flush(self) -> None: ...

    def stats(self) -> dict[str, Any]: ...


class CoreReplica:
    """One of the engines. rank: its number among them."""

    def __init__(self, rank: int, link: Link, core: RemoteCore) -> None:
        self.rank, self.link, self.core = rank, link, core
        self._threads = ThreadPoolExecutor(MAX_HINTS, f"engine-{rank}")

    @property
    def is_running(self) -> bool:
        return self.link.state == "running"

    def answers(self) -> bool:
        """Whether it runs and gives signs of life."""
        return self.is_running and self.link.silent_s < SILENT_S

    @property
    def num_requests(self) -> int:
        return len(self.link.outputs)

    def briefly(self, verb: Callable[[RemoteCore], R]) -> R | None:
        """Call it, and wait for the result as long as it gives signs of life; None if it does not."""
        if not self.answers():
            return None
        result = self._threads.submit(verb, self.core)
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
        found = self.briefly(lambda core: core.stats())
        if found is not None:
            return {"rank": self.rank, **found}
        state = "silent" if self.is_running else self.link.state
        process = {"state": state, "pid": self.link.pid, "restarts": self.core.life, "requests": self.num_requests}
        return {"rank": self.rank, "process": process}

    def close(self) -> None:
        self.core.close()
        self._threads.shutdown(wait=False)


class Routing:
    """Where requests go. most_ahead: how many requests an engine may have more than another before its conversations go
    there. Any thread may call it. The event loop may wait for the lock, so nothing is hashed under it but answers.
    """

    def __init__(self, replicas: Sequence[CoreReplica], block_size: int, most_ahead: int) -> None:
        self._replicas, self._most_ahead = replicas, most_ahead
        self._affinity = Whereabouts(block_size)
        self._lock = threading.Lock()
        self._num_sent: Counter[int] = Counter()  # by rank
        self._running: list[tuple[Handle, list[BlockId], str, str, int]] = []  # with chain, tenant, salt and rank

    def order(self, token_ids: Sequence[int], tenant: str, cache_salt: str = "") -> list[CoreReplica]:
        """Those that answer, the best for these tokens first. All, if none does."""
        chain = self._affinity.chain(token_ids, tenant, cache_salt)
        with self._lock:
            self._note_ended()
            last = self._affinity.engine_of(chain)
            found = [one for one in self._replicas if one.answers()] or list(self._replicas)
            found.sort(key=lambda one: (one.num_requests, self._num_sent[one.rank]))
            least = found[0].num_requests
            found.sort(key=lambda one: one.rank != last or one.num_requests >= least + self._most_ahead)
            return found

    def sent(self, token_ids: Sequence[int], tenant: str, cache_salt: str, rank: int, handle: Handle | None) -> None:
        """This engine has got a request for these tokens, or something else to do with them."""
        chain = self._affinity.chain(token_ids, tenant, cache_salt)
        with self._lock:
            self._affinity.note(chain, rank)
            if handle is not None:
                self._num_sent[rank] += 1
                self._running.append((handle, chain, tenant, cache_salt, rank))

    def _note_ended(self) -> None:
        ended = [one for one in self._running if one[0].done]
        if ended:
            self._running = [one for one in self._running if not one[0].done]
        for handle, chain, tenant, cache_salt, rank in ended:
            output = handle.output
            said = [*output.prompt_token_ids, *output.choices[0].token_ids]
            self._affinity.note(self._affinity.chain(said, tenant, cache_salt, chain), rank)


class DataParallelCore:
    """A `Core`. replicas: the engines, all of them ready. disk: None without a disk tier. most_ahead: see `Routing`.
    root_secret: of the lineage roots of all engines.

    An engine that has ended, and is started again, has nothing in its memory: what goes to all passes it over. It knows
    no more of pins than the disk does.
    """

    life = 0  # all lineage roots outlive an engine's process

    def __init__(
        self, replicas: Sequence[CoreReplica], disk: SharedDisk | None, most_ahead: int, root_secret: bytes
    ) -> None:
        self._replicas, self._disk, self._root_secret = replicas, disk, root_secret
        facts = [one.core.facts for one in replicas]
        self.facts: Facts = replace(facts[0], max_request_tokens=min(one.max_request_tokens for one in facts))
        self._routing = Routing(replicas, self.facts.block_size, most_ahead)

    @property
    def closed(self) -> bool:
        return all(one.core.closed for one in self._replicas)

    @property
    def has_work(self) -> bool:
        return any(one.core.has_work for one in self._replicas)

    def check_open(self) -> None:
        if not any(one.is_running for one in self._replicas):
            self._replicas[0].core.check_open()

    def close(self) -> None:
        """Close all at once, as each may take a while."""
        closing = [threading.Thread(target=one.close, name="engine-close") for one in self._replicas[1:]]
        with suppress(RuntimeError):  # at its exit Python may start no thread: then one after the other
            for thread in closing:
                thread.start()
        for one in self._replicas:
            one.close()
        for thread in closing:
            if thread.is_alive():
                thread.join()

    def _each(self, verb: Callable[[RemoteCore], R]) -> list[R]:
        """Call all that run. Passes over those that end meanwhile."""
        results = []
        for one in self._replicas:
            if one.is_running:
                with suppress(EngineDiedError):
                    results.append(verb(one.core))
        return results

    # -- requests ----------------------------------------------------------------------------------------------------
    def submit_all(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        spliced: tuple[Sequence[BlockId], Lineage] | None = None,
        listener: Listener | None = None,
        turn_starts: Sequence[int] = (),
    ) -> list[Handle]:
        check_owner(tenant, cache_salt, priority)
        for token_ids, params in prompts:
            checked_request(token_ids, params, self.facts)
        handles: list[Handle] = []
        try:
            for token_ids, params in prompts:
                asked = [(token_ids, params)], tenant, cache_salt, priority, spliced, listener, turn_starts
                order = self._routing.order(token_ids, tenant, cache_salt)
                one, [handle] = self._first_of(order, lambda core: core.submit_all(*asked))  # noqa: B023
                handles.append(handle)
                self._routing.sent(token_ids, tenant, cache_salt, one.rank, handle)
        except Exception:
            for handle in handles:
                self.abort(handle)
            raise
        return handles

    @staticmethod
    def _first_of(order: Sequence[CoreReplica], verb: Callable[[RemoteCore], R]) -> tuple[CoreReplica, R]:
        """Call the first that has not ended. Raises what the last one raises, if all have."""
        for one in order[:-1]:
            with suppress(EngineDiedError):
                return one, verb(one.core)
        return order[-1], verb(order[-1].core)

    def abort(self, handle: Handle) -> None:
        for one in self._replicas:
            one.core.abort(handle)  # their requests have different ids

    # -- the KV of conversations -------------------------------------------------------------------------------------
    def root(self, tenant: str) -> BlockId:
        return lineage_root(self._root_secret, self.facts.fingerprint.hex(), tenant, "")

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
    ) -> tuple[list[BlockId], Lineage] | None:
        order = self._routing.order(token_ids, tenant)
        one, found = self._first_of(order, lambda core: core.splice(chain, token_ids, lineage, spans, tenant))
        kept = [token for begin, end in spans for token in token_ids[begin:end]]
        self._routing.sent(kept, tenant, "", one.rank, None)
        return found

    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        order = self._routing.order(token_ids, tenant)
        one, _ = self._first_of(order, lambda core: core.prefetch(chain, token_ids, lineage, tenant))
        self._routing.sent(token_ids, tenant, "", one.rank, None)

    def pin(self, chain: Sequence[BlockId], seconds: float) -> None:
        for one in self._replicas:
            one.briefly(lambda core: core.pin(chain, seconds))
        if self._disk is not None:
            self._disk.pin(chain, seconds)

    def expire(self, chain: Sequence[BlockId], at_s: float | None) -> None:
        for one in self._replicas:
            one.briefly(lambda core: core.expire(chain, at_s))
        if self._disk is not None:
            self._disk.pin(chain, None, math.inf if at_s is None else at_s)

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float) -> bool:
        are_gone = self._each(lambda core: core.forget(block_ids, timeout_s))
        return all(are_gone) and (self._disk is None or self._disk.forget(block_ids, timeout_s))

    # -- the store ---------------------------------------------------------------------------------------------------
    def evict(self, what: Evict) -> dict[str, Evicted]:
        """to_bytes: of a tier of all engines together; each keeps the same part."""
        part = what if what.to_bytes is None else replace(what, to_bytes=what.to_bytes // len(self._replicas))
        found = {"hbm": Evicted(), "cpu": Evicted()}
        for tiers in self._each(lambda core: core.evict(part)):
            for tier, evicted in tiers.items():
                before = found.get(tier, Evicted())
                found[tier] = Evicted(before.num_blocks + evicted.num_blocks, before.num_bytes + evicted.num_bytes)
        return found if self._disk is None else {**found, "disk": self._disk.evict(what)}

    def verify(self, delete: bool) -> dict[str, object]:
        return {} if self._disk is None else self._disk.verify(delete)

    def compact(self) -> dict[str, object]:
        return {} if self._disk is None else self._disk.compact()

    def flush(self, chain: Sequence[BlockId] = (), timeout_s: float = 60.0) -> int:
        self.check_open()
        num_shared = self._each(lambda core: core.flush(chain, timeout_s))
        if self._disk is not None:
            self._disk.flush()
        return max(num_shared, default=0)

    def stats(self) -> dict[str, object]:
        """Totals of the engines that answer; `replicas`: the counters of each."""
        self.check_open()
        each = [one.stats() for one in self._replicas]
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
