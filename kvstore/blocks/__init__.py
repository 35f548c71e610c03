"""Blocks, in whatever memory: their names, what is told of them, which is free and which goes next.

Knows no tier, no I/O and no tensor; of policies it knows the conversations that blocks belong to.

- `forest`: the cached blocks of a tier as a forest, and which of them goes next
- `ids`: names of blocks: ids, chains, and where a splice stands in one
- `pool`: which block is in use, cached, or next to go
- `records`: what crosses the borders between tiers: records, transfers, outcomes
"""
