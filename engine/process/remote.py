"""RemoteCore: a core in a process of its own. Tokens are made there, text is made here.

So tokenizing, templates, detokenizing and HTTP do not share an interpreter with the engine's steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict, Evicted
from kvstore.engine.core.output_processor import Handle, Listener
from kvstore.engine.process.link import POLL_S, Link
from kvstore.engine.process.wire import Submit, encode, owner_to_wire, params_to_wire
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.core import Bell, Facts, checked_request
from kvstore.engine.text.prompts import check_owner
from kvstore.errors import EngineClosedError, EngineDiedError, EngineOverloadedError, KVStoreError

MAX_REQUESTS = 16384


class RemoteCore:
    """A `Core`. link: to the process, which is ready. backend: decodes ids to text; None without a tokenizer.

    max_requests: in the process at once; this bounds what is queued between the two processes. numbers: of requests, if
    they are to differ from those of other cores.
    """

    def __init__(
        self, link: Link, backend: Any, max_requests: int = MAX_REQUESTS, numbers: Iterator[int] | None = None
    ) -> None:
        self._max_requests = max_requests
        self._link = link
        self._backend = backend
        self._roots: dict[tuple[int, str], BlockId] = {}
        self._counter = itertools.count() if numbers is None else numbers

    @property
    def facts(self) -> Facts:
        return self._link.hello.facts

    @property
    def life(self) -> int:
        return self._link.restarts.num_restarts

    @property
    def closed(self) -> bool:
        return self._link.is_over

    @property
    def has_work(self) -> bool:
        return len(self._link.outputs) > 0 or bool(self._link.outputs.untold)

    def check_open(self) -> None:
        self._link.check_open()

    def close(self) -> None:
        self._link.close()

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
        """Raises EngineOverloadedError at max_requests, EngineDiedError without a process."""
        check_owner(tenant, cache_salt, priority)
        link, facts, handles = self._link, self.facts, list[Handle]()
        longest = [checked_request(token_ids, params, facts) for token_ids, params in prompts]
        tenant_bytes, salt = owner_to_wire(tenant), owner_to_wire(cache_salt)
        beginning = None if spliced is None else (list(spliced[0]), spliced[1])
        try:
            for (token_ids, params), most in zip(prompts, longest, strict=True):
                request_id, wire = f"request-{next(self._counter)}", params_to_wire(params)
                message = encode(
                    Submit(request_id, token_ids, wire, tenant_bytes, salt, priority, beginning, turn_starts)
                )
                with link.changed:
                    life = link.check_open()
                    if len(link.outputs) >= self._max_requests:
                        raise EngineOverloadedError(f"{self._max_requests} requests run or wait; try again")
                    link.read()
                    handle = link.outputs.add(
                        request_id, token_ids, params, most, self._backend, facts.block_size, listener or Bell()
                    )
                    try:
                        life.send(message)
                    except KVStoreError as error:
                        link.outputs.end(request_id, error)
                        raise
                    handles.append(handle)
        except Exception:
            for handle in handles:
                self.abort(handle)
            raise
        return handles

    def abort(self, handle: Handle) -> None:
        """End a request. Returns when the engine's process has confirmed it; the reading thread does not wait."""
        link = self._link
        with link.changed:
            if not link.outputs.is_running(handle):
                return
            link.end_request(handle.request_id, None, "abort")
            while not handle.done and link.reader is not threading.current_thread():
                link.changed.wait(POLL_S)

    # -- the KV of conversations -------------------------------------------------------------------------------------
    def root(self, tenant: str) -> BlockId:
        place = (self.life, tenant)
        if place not in self._roots:
            self._roots[place] = self._link.call("root", tenant)
        return self._roots[place]

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
    ) -> tuple[list[BlockId], Lineage] | None:
        return self._link.call("splice", chain, token_ids, lineage, spans, tenant)

    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        self._link.call("prefetch", chain, token_ids, lineage, tenant)

    def pin(self, chain: Sequence[BlockId], seconds: float) -> None:
        self._link.call("pin", chain, seconds)

    def expire(self, chain: Sequence[BlockId], at_s: float | None) -> None:
        with suppress(EngineClosedError, EngineDiedError):  # the next process does not know the request
            self._link.call("expire", chain, at_s)

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float) -> bool:
        return self._link.call("forget", block_ids, timeout_s)

    # -- the store ---------------------------------------------------------------------------------------------------
    def evict(self, what: Evict) -> dict[str, Evicted]:
        return self._link.call("evict", what)

    def verify(self, delete: bool) -> dict[str, object]:
        return self._link.call("verify", delete)

    def compact(self) -> dict[str, object]:
        return self._link.call("compact")

    def flush(self, chain: Sequence[BlockId] = (), timeout_s: float = 60.0) -> int:
        return self._link.call("flush", chain, timeout_s)

    def stats(self) -> dict[str, object]:
        """The core's counters, and those of its process."""
        link = self._link
        process = {"state": link.state, "pid": link.pid, "restarts": self.life, "requests": len(link.outputs)}
        return {**link.call("stats"), "process": process}
