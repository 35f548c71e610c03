"""Requests and steps: which request computes how many tokens, in which blocks. Token ids only.

Loads no torch; knows the store by the scheduler's side of the connector.

- `beam_search`: which continuations of a prompt go on, which are answers, and when no better one can come
- `input_batch`: the persistent batch: arrays reused from step to step
- `kv_cache_manager`: blocks of requests in HBM: prefix hits, allocation, caching, release, erasure; and loads from
  below it
- `request`: one request and its state; what steps have brought for each prompt: tokens and ends
- `scheduler`: which request computes how many tokens in the next step; all requests from arrival to end
- `state_slots`: slots for the states of a model that keeps some, and checkpoints of these
- `step_loop`: the one loop that steps an engine, in a thread of its own: it serves its inbox, schedules, launches and
  reads steps, and hands out what is new
- `tenants`: whose turn it is: equal shares of the running set and of each step for all tenants
- `window_slots`: which blocks have KV of layers with a window, and in which order they lose it

Decisions:

One token budget a step instead of phases: chunked prefill, decode and prefix hits are the same case. Running requests
come first, then waiting ones. When blocks run out, the latest request releases its blocks and waits; they stay cached
until they are needed. A request whose blocks are on their way from disk waits, and those behind it go first.

Tenants share equally. Whoever runs fewest sequences is admitted next, and while several have tokens to compute, each
may take the same part of a step. When all places or blocks are taken and a waiting tenant runs less than another, the
latest sequence of the tenant that runs most is preempted, so a newcomer's prompt is in the next step. A tenant's past
use does not count. The store is told the order in which requests are expected to start.

Choices of one prompt (`n` > 1): the first one computes the prompt, all draw their first token from its logits and share
its blocks. So prompt tokens are computed once.

Beams are such choices, too: one that goes on in two ways is forked, and shares its blocks and gets a copy of its state;
a beam whose most likely token is taken keeps its row. A search whose beams are not all computed in a step gives up
what is computed, and begins again at its cached blocks: nobody holds what others wait for. The tiers below HBM have a
beam only up to the block in which it was forked; the next turn computes and stores what is missing.

The batch is kept as arrays from step to step; requests join and leave in place. What computes is handed in
(`step_loop.Runner`). Deleted KV is overwritten in HBM, too: at once, or as soon as no request holds it.
"""
