"""Traces made by hand, and random ones whose prompts go on from each other. Blocks have 10 tokens."""

import itertools
import random

from kvstore.planning.traces import Trace, TraceRequest

SIZE = 10


def request(chain, num_tokens=None, num_output_tokens=0, at_s=0.0, **more):
    num_tokens = len(chain) * SIZE + 1 if num_tokens is None else num_tokens
    return TraceRequest(tuple(chain), num_tokens, num_output_tokens, at_s, **more)


def trace(*requests):
    return Trace("by hand", SIZE, requests)


def chained_trace(seed, num_requests=400, has_partial=True):
    """Prompts that go on from any prompt before, at its end or in its middle, or begin anew; some are repeated."""
    rng = random.Random(seed)
    fresh = itertools.count(1)
    prompts = [[0]]
    requests, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(1.0)
        if requests and rng.random() < 0.1:
            old = rng.choice(requests[-20:])
            requests.append(TraceRequest(old.chain, old.num_tokens, 0, now_s, -1, old.partial))
            continue
        before = rng.choice(prompts[-30:])
        head = before if rng.random() < 0.7 else before[: rng.randint(0, len(before))]
        chain = [*head, *(next(fresh) for _ in range(rng.randint(0, 5)))]
        prompts.append(chain)
        num_rest = rng.randint(0, SIZE - 1)
        partial = next(fresh) if has_partial and num_rest else None
        requests.append(TraceRequest(tuple(chain), max(len(chain) * SIZE + num_rest, 1), 0, now_s, -1, partial))
    return Trace(f"chained {seed}", SIZE, requests)
