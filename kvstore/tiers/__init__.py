"""The port behind which every tier below the CPU is one back end, and the worker that uses it.

Knows no back end, no arena and no request. The back ends are `kvstore.disk.tier`, `kvstore.remote.redis_blocks`,
`object_blocks` and `owned_blocks`, and the replay's virtual disk.

- `port`: what a tier does; jobs, and how they ended
- `queues`: reads by rank; writes, deletions and times of last use that wait for a batch; what an executor takes of them
- `worker`: threads that ask, read and write for one tier, and are polled; whether a tier that has failed is tried again

Decisions:

There are two kinds of tiers. One is exact: its index says what it has, and what it evicts is decided here. The other is
believed: it says what it has when it is asked, evicts by itself, and may be away. After a failure nobody waits for a
believed tier until a probe has succeeded; an exact one is read on, and its writes are tried again.

A job names a handle: a record and memory, whatever owns that. So an arena block, a host's buffer and no bytes at all
are read and written in the same way.

The worker decides what is done next, and an executor when it is done: threads, or the events of a virtual clock.

Reads have three classes: for a request that runs, for those that wait in the queue's order, and hints. An earlier read
may take arena blocks from later ones; nobody waits for a later one, so there is no deadlock. A queued read that nobody
wants any more is dropped.
"""
