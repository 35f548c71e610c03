"""Blocks, in whatever memory: their names, what is told of them, which is free and which goes next.

Knows no tier, no I/O and no tensor; of policies it knows the conversations that blocks belong to.

- `forest`: the cached blocks of a tier as a forest, and which of them goes next
- `ids`: names of blocks: ids, chains, and where a splice stands in one
- `keys`: ids and records of blocks that somebody else names
- `pool`: which block is in use, cached, or next to go
- `records`: what crosses the borders between tiers: records, transfers, outcomes

Decisions:

A block's id is SHA-256 over its parent's id and its token ids, from a root that is an HMAC with the store's secret
over the model's fingerprint, the tenant and the caller's salt. So another model, tenant or salt never hits, and the
secret keeps ids stable across restarts. Speed is no reason for a weaker hash: a chain of 50,000 tokens takes 3 ms.

On every tier blocks go leaf by leaf: a block is given up only when no cached block builds on it, so what is kept
can always be used from its beginning. Per tier and conversation there is one entry, the last of its blocks; a block
knows who ends at it, at most 16. So the cost is O(1) a block and O(log n) a conversation, however many share a
head.

An edited message or a second answer leaves a copy of the conversation on the branch that was left. The first block
of a splice is linked to the block in front of it, though it names an HMAC as its parent, so that the head stays
with the rest.

A block with several references is never written: its next writer gets a copy. Choices of one prompt share its
blocks, the partial tail included.
"""
