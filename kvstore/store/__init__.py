"""The control plane: what moves between the tiers, for which request, and when.

One thread. It moves no bytes itself and, except for `assembly`, loads no torch.

- `assembly`: opens the tiers and puts the parts together
- `context`: what the parts of a store share, and all blocks of its engine
- `control_plane`: requests, steps and splices of a store, and their ends
- `deletion`: by request, with all that was computed after it; eviction by hand
- `history`: what a store remembers of its own traffic, and what was learned, kept between starts
- `host_blocks`: the disk without tiers above it, for a host with memory of its own (`kvstore.block_store`): what it
  reads and writes, and what is read ahead for it
- `host_conversations`: whose blocks such a host writes and asks for
- `old_states`: which states of a chain go when a turn has left new ones, and when
- `parts`: the parts of a store, and the order in which they end; waiting for what worker threads do; the thread that
  polls while nobody steps; eviction by hand, checks, compaction
- `prefetch`: whose blocks are read next, and what a request may load when it is scheduled
- `quantised`: which quantised copies a chain can begin with
- `remote`: a believed tier, as the store sees it: questions, what is read from it, prompts that another server computes
- `remote_stores`: what goes there
- `requests`: what a request has in flight: blocks held and read for it
- `saving`: which tokens of a step are saved, and where; the transfers of steps that are in flight
- `seam`: what crosses the connector
- `splicing`: new blocks out of runs of tokens of others
- `stored`: which of a chain's blocks the tiers hold, with the states behind them, and whose they are; reads in flight,
  and their urgency
- `tiered`: the connector with tiers; one lock
- `write_back`: what is written next, what is evicted or deleted from disk, and what becomes of failed writes

Decisions:

Every full block is saved, generated tokens included, as a turn's answer is the next turn's history. When the arena is
full of dirty blocks, or more activations wait than may be kept alive, the save is dropped and counted. HBM cannot make
up for it, since its keys are rotated. So the block is remembered as unsaved: when there is room, a later request stops
before it and computes it, which closes the hole. A block whose parent is stored nowhere is not saved, as nobody could
load it.

What CPU and disk hold together is closed under parents; writes and evictions keep that. A dirty block is not
evicted from CPU; afterwards evicting it there is metadata only. One arena block in 16 is kept empty, so a read
never waits for an eviction.

A block being read is announced at once, and published after header, checksum and identity are checked. Any miss,
damage, failure or timeout ends in the same place: the tokens are computed, and the cause is counted.

A remote tier is one more, below the disk. What it has is asked when a request arrives, and the request waits for the
answer as for a read. What was read from there goes on to disk as if it had been computed; until its head has come it
may stand there alone, and is found again by its head's ids. Chains go there when their requests end, not block by
block, so that a hole is closed at the next turn.

Truncation keeps KV by splices: runs of tokens copied within the arena, at token granularity, by an I/O thread. The
first spliced block is built on an HMAC of its sources, so no computed chain can meet it; ids after it build on that.
A chain may have several splices, with computed blocks in between. When a part of one is missing, all are given up,
and the tokens are computed under their exact chain. Re-encoded KV has attended to other tokens: it is approximate,
counted, and never mixed with exact hits.

With `int8` the disk has copies in the place of blocks, each under an id made of the block's, which says that it is one.
So a lookup of an exact block never finds a copy, and what is computed behind a copy has ids that no exact chain has. A
chain has copies from its first block on: then an id behind them names one history. A lineage keeps the ids of their
sources, which sessions store: so sessions share blocks whether they have seen exact ones or copies, and a deletion
reaches both.

The control plane has one lock, taken by the connector's verbs. Workers never take it and never call back: they put
what they finished into queues, and `poll()` collects it once a step. Every queue is bounded.
"""
