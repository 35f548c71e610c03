"""Several engines of one model behind one front, each in a process of its own. Token ids only, as in `process`.

Knows no HTTP and no tensor.

- `affinity`: which engine has the KV of a prompt's beginning
- `core`: `DataParallelCore`: a `Core` over several
- `dividing`: one configuration for all becomes one for each
- `links`: the links to their processes, read as one
- `totals`: their counters in one dict

Decisions:

A request goes where its conversation was last, and a new conversation to the engine with the fewest requests. A prefix
with which several conversations begin, such as a system prompt, says nothing of where one of them belongs; each engine
computes it once. When an engine has more requests than others by a good part of a batch, or does not answer, its
conversations go on elsewhere: affinity saves time, and nothing depends on it.

There is one disk tier. The front owns it (`kvstore.owned_disk`), and the engines ask for blocks and store them through
its socket, as they would in a tier that servers share. So each engine finds what the others have computed, an engine
that dies takes nothing with it but what was in its memory, and their number may change with each start. HBM and CPU
tier belong to one engine. All have the front's secret, so a block has one id in all of them.
"""
