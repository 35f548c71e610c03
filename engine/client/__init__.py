"""The one client of the core, and the core in this process, in a process of its own, or several times. Token ids cross.

Knows no session and no HTTP. Only `local` loads torch.

- `local`: `LocalCore`: loads the model, whole or the first rank's part, and assembles loop, model and tiers here
- `messages`: `Core`: what computes, wherever it runs; prompts, verbs and their results, as they also cross between
  processes
- `opening`: opens the core that an engine has, and divides one configuration among several
- `remote`: `RemoteCore`: starts, watches, restarts and closes a core in a process of its own; `CoreServer`: serves it
  there
- `requests`: `CoreClient`: every running request with its handle, text, stop strings and usage
- `several`: `SeveralCores`: several processes, each with the whole model, as one core: routes, adds up counters

Decisions:

A core knows no text. It takes prompts as token ids, and its news are token ids, ends and figures; what else is asked of
it is a `Call`, whose class names the type of its result. Handles, text, stop strings and usage are made by one class
for every core: on the stepping thread right after a step, or by whoever reads the messages of the core's process. A
stop string ends a request one step later where the next step has already begun.

The core may run in a process of its own, as vLLM's does. Prompts, news and calls share one socket pair, which the
event loop reads itself. A call has a number; its caller waits for the answer in a thread. Messages are msgspec's;
nothing is pickled. It is faster with few clients (8 to 15 % between tokens), and it can be restarted: at once, then
with growing delays.

Of several cores a request goes to the one where its conversation was last, and a new conversation to the one with the
fewest requests. A prefix with which several conversations begin, such as a system prompt, says nothing of where one of
them belongs; each computes it once. When one has more requests than others by a good part of a batch, or does not
answer, its conversations go on elsewhere: affinity saves time, and nothing depends on it.

They share one disk tier. The front owns it (`kvstore.owned_disk`), and the cores ask for blocks and store them through
its socket, as they would in a tier that servers share. So each finds what the others have computed, one that dies takes
nothing with it but what was in its memory, and their number may change with each start. HBM and CPU tier belong to one
core. All have the front's secret, so a block has one id in all of them.
"""
