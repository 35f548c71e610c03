"""The engine: continuous batching with a token budget and hashed prefix caching, over a store of tiers.

Knows the store by its seam (`kvstore.connector`), and nothing of HTTP or the command line.

- `core/`: requests, scheduler, batch
- `model/`: the model and what runs a step on it
- `text/`: templates, prompts, answers' text
- `sessions/`: conversations as token ids
- `client/`: the one client of the core, and the core here, in a process of its own, or several times
- `ranks/`: other processes, each with a part of the model
- `builtin/`: the built-in model's files
- `admin`: eviction, deletion of sessions, and the requests of other processes
- `async_engine`: `AsyncEngine`: an engine for asyncio, and its sessions as `AsyncChat`
- `config`: the engine's options, built once and checked
- `engine`: `Engine`: prompts, conversations and administration, whichever process computes
- `progress`: what an engine says while it starts; warnings in one line
- `process`: a process that computes for this one: channel, start, signs of life, end
- `child`: what such a process does first, and with whom it ends
- `program`: the program of a process that computes for another: of an engine, or of another rank
- `outputs`: what a caller gets back: facts about the engine, choices, usage, pieces of a stream
- `sampling_params`: how a request is sampled and when it stops
- `stats`: the shape of `Engine.stats()`
- `turns`: an answer in an event loop: a task that is told and never cancelled; which turn holds a session

Decisions:

An engine has two halves. The front owns texts, sessions, answers and their files; the core owns token ids, KV, the
model and the tiers. They meet in the protocol `Core` (`client/messages`), in one process or two. The front opens and
locks the store's directory and answers the owner's socket; the core gets a share of the lock. So the store stays locked
until both have ended, even while the core restarts. Conversations do not depend on the core's process: they can be read
during a restart, and the front makes a turn durable.

`hbm="auto"` on a CPU takes a quarter of the available memory, at most four times `max_num_seqs` full windows. On CUDA
it leaves room for graphs and for activations that wait to be saved, and takes at most 16 times `max_num_seqs` full
windows: a card could hold millions of blocks of a small model, and Python keeps an entry for each.

A turn that loses its reader is not stored: its user never saw it acknowledged, so a retry starts clean, and the KV
stays cached. A turn that is stopped on purpose is stored with the answer so far.

Long texts are tokenized two at a time, off the event loop, as each takes about two hundred times its size in memory.
Short texts do not wait for them. A text that fits no window, even with the longest tokens of the vocabulary, is refused
before it waits.
"""
