"""The engine: continuous batching with a token budget and hashed prefix caching, over a store of tiers.

Knows the store by its seam (`kvstore.connector`); nothing of HTTP and of the command.

- `core/`: requests, scheduler, batch
- `model/`: the model and what runs a step on it
- `text/`: templates, prompts, answers' text
- `sessions/`: conversations as token ids
- `process/`: the loop in a process of its own
- `builtin/`: the built-in model's files
- `admin`: eviction, deletion of sessions, and the requests of other processes
- `async_engine`: `AsyncEngine`: an engine for asyncio, and its sessions as `AsyncChat`
- `config`: the engine's options, built once and checked
- `core_process`: the program of the engine's own process
- `engine`: `Engine`: front and core in one process
- `front`: what a program sees of an engine, whatever process computes
- `local_core`: the core in this process: loop, model and tiers put together
- `lifetime`: how an engine ends: closed, dropped, at the interpreter's exit
- `outputs`: what a caller gets back: choices, usage, pieces of a stream
- `remote_engine`: `RemoteEngine`: an engine whose core runs in a process of its own
- `sampling_params`: how a request is sampled and when it stops

Decisions:

An engine has two halves. The front has texts, sessions, answers and their files; the core has token ids, KV, the model
and the tiers. They meet in the protocol `Core` of `sessions/core`, in one process or in two. The front opens and locks
the store's directory and answers the owner's socket; the core gets a share of the lock, so the store stays locked until
both have ended, and nobody slips in while the core is started again. What a person said does not depend on the core's
process: it can be read while that is started again, and a turn is durable in the front.

`hbm="auto"` on a CPU takes a quarter of the available memory, at most four times `max_num_seqs` full windows. On
CUDA it leaves room for graphs and for activations that wait to be saved, and takes no more than 16 times
`max_num_seqs` full windows: a card would hold millions of blocks of a small model, and Python keeps books on each.

A turn that loses its reader is not stored: its person never saw it acknowledged, so asking again starts clean; what
was computed stays cached. A turn that is stopped on purpose is stored with what was said.

Long texts are tokenized two at a time, off the event loop: a text takes about two hundred times its size meanwhile.
Short ones go by them. A text that fits no window, even in the longest tokens there are, is refused before it waits
for anything.
"""
