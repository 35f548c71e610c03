"""The control plane: what travels between the tiers, for whom, and when. One thread.

Moves no bytes itself and loads no torch, `assembly` apart, which puts the parts together.

- `assembly`: opens the tiers and puts the parts together
- `control_plane`: requests, steps and splices of a store, and what has ended of them
- `deletion`: what is forgotten, or evicted by hand
- `disk_contents`: what is on disk, also before its index is loaded
- `disk_space`: what goes from the disk: to make room, deleted, lost
- `history`: what a store remembers of its own traffic: times and lengths
- `host_blocks`: the disk without tiers above it, for a host with memory of its own (`kvstore.block_store`)
- `host_conversations`: whose blocks such a host writes and asks for
- `host_writes`: its writes, while its memory is borrowed for them; tickets
- `housekeeping`: the thread that polls while nobody steps
- `learned`: what was learned, between two starts
- `matching`: what a request may load when it is scheduled
- `parts`: the parts of a store, and the order in which they end
- `prefetch`: whose blocks are read next
- `progress`: waiting for what worker threads do
- `reads`: reads in flight, how urgent each is, and what becomes of those that nobody waits for
- `requests`: what a request has in flight: held for it, read for it, saved of it
- `saving`: which tokens of a step are saved, and where to
- `seam`: what crosses the connector
- `splicing`: new blocks out of runs of tokens of others
- `steps`: the transfers of steps that are in flight
- `stored`: which blocks CPU and disk have together, and whose they are
- `tiered`: the connector with tiers; one lock
- `upkeep`: eviction by hand, checks, compaction
- `write_back`: what is written next, and what becomes of what failed
- `write_queue`: blocks that wait to be written, and those that the writer has

Decisions:

Every full block is saved, generated tokens included, as a turn's answer is the next turn's history. When the arena
is full of dirty blocks, or more activations wait than may be kept alive, the save is dropped and counted. HBM could
never make up for it, since its keys are rotated; so the block is remembered as unsaved: a later request stops
before it when there is room, computes it, and the hole is closed. A block whose parent is stored nowhere is not
saved, as nobody could load it.

What CPU and disk hold together is closed under parents; writes and evictions keep that. A dirty block is not
evicted from CPU; afterwards evicting it there is metadata only. One arena block in 16 is kept empty, so a read
never waits for an eviction.

A block that is read is announced at once and published after header, checksum and identity were checked. Any miss,
damage, failure or timeout ends in the same place: the tokens are computed, and the cause is counted.

Truncation keeps KV by splices: runs of tokens copied within the arena, at token granularity, by an I/O thread. The
first spliced block is built on an HMAC of its sources, so no computed chain can meet it; ids after it build on
that. When a part of it is missing, all of it is given up and the kept tokens are computed under their exact chain.
Re-encoded KV once attended to what was dropped: it is approximate, counted, and never mixed with exact hits.

The control plane has one lock, taken by the connector's verbs. Workers never take it and never call back: they put
what they finished into queues, and `poll()` collects it once a step. Every queue is bounded.
"""
