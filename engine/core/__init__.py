"""Requests and steps: who computes how many tokens of what, in which blocks. Token ids only.

Loads no torch; knows the store by the scheduler's side of the connector.

- `inbox`: what is asked of the thread that steps an engine: functions that it calls between two steps, in the order
  of asking
- `input_batch`: the persistent batch: arrays reused from step to step
- `kv_cache_manager`: blocks of requests: prefix hits, allocation, caching, release
- `request`: one request and its state
- `scheduler`: which request computes how many tokens in the next step
- `step_loop`: the one loop that steps an engine, in a thread of its own: it answers the inbox, steps, and tells who
  waits
- `tenants`: whose turn it is: equal shares of the running set and of each step for all tenants
"""
