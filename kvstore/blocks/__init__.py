"""Blocks in any memory: their ids, their records, which are free, and which is evicted next.

Knows no tier, no I/O and no tensor; of policies it knows the conversations that blocks belong to.

- `forest`: a tier's cached blocks, by their links and owners; which is evicted next, and which a selection evicts; what
  blocks in flight build on
- `holdings`: which tiers hold which blocks, and which of this was announced
- `ids`: block ids, chains, and a splice's place in one
- `keys`: ids and records of blocks with another engine's keys
- `pool`: which block is in use, cached, or next to go
- `records`: data between tiers: records, transfers, outcomes

Decisions:

A block's id is SHA-256 over its parent's id and its token ids, from a root that is an HMAC with the store's secret
over the model's fingerprint, the tenant and the caller's salt. So another model, tenant or salt never hits, and the
secret keeps ids stable across restarts. Speed is no reason for a weaker hash: a chain of 50,000 tokens takes 3 ms.

Every tier evicts leaf by leaf: a block is evicted only when no cached block builds on it, so what is kept can always be
used from its beginning.

In each tier a conversation owns one block, at which it ends, and a block has at most one owner: who used it last. When
it is evicted, its owner goes on to the parent, where the more valuable of two stays. So the cost is O(1) a block,
however many share a head. An edited message or a second answer leaves a remnant on the abandoned branch: the
conversation as it was then, without its requests and pins. Two simpler ways hit less: with all that it has left, a
conversation of thoughts that are dropped hit up to .015 less; with nobody's branches going first, forks that run side
by side hit .006 less.

The first block of a splice names an HMAC as its parent. It is linked to the block before it all the same, so that the
head stays with the rest.

A block with several references is never written: its next writer gets a copy. Choices of one prompt share its
blocks, the partial tail included.
"""
