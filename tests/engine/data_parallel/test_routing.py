"""Tests of kvstore.engine.data_parallel.core.Routing without engines."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from kvstore.engine.data_parallel.core import Routing
from tests.support.engines import tokens


class Slow(list):
    """Tokens that are hashed only when `go_on` is set."""

    def __init__(self, token_ids):
        super().__init__(token_ids)
        self.is_asked, self.go_on = threading.Event(), threading.Event()

    def __getitem__(self, place):
        self.is_asked.set()
        assert self.go_on.wait(300)
        return super().__getitem__(place)


def test_nobody_waits_while_a_long_prompt_is_hashed():
    replicas = [SimpleNamespace(rank=rank, num_requests=0, answers=lambda: True) for rank in range(2)]
    routing, long = Routing(replicas, 16, 8), Slow(tokens(1, 160))
    with ThreadPoolExecutor(2) as threads:
        for call in (lambda: routing.order(long, ""), lambda: routing.sent(long, "", "", 1, None)):
            try:
                waiting = threads.submit(call)
                assert long.is_asked.wait(300)
                assert threads.submit(routing.order, tokens(2, 40), "").result(300)[0].rank == 0
                assert not waiting.done()
            finally:
                long.go_on.set()
            waiting.result(300)
            long.is_asked.clear(), long.go_on.clear()
    long.go_on.set()
    assert routing.order(long, "")[0].rank == 1
