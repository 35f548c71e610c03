"""The control plane: what travels between the tiers, for whom, and when. One thread.

Moves no bytes itself and loads no torch, `tiered` apart, which puts the parts together.

- `history`: what a store remembers of its own traffic: times and lengths
- `lookup`: what a request may load, held for it until it is scheduled
- `prefetch`: whose blocks are read next: the queue's order meets the planner
- `reads`: reads in flight, how urgent each is, and what becomes of those that nobody waits for
- `saving`: which tokens of a step are saved, and where to
- `splicing`: new blocks out of runs of tokens of others
- `store`: everything in flight between the tiers: steps, splices, evictions
- `tiered`: the connector with tiers: builds the parts, one lock, one housekeeping thread
- `write_back`: dirty slots, and what goes when the disk fills
"""
