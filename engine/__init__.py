"""The engine: continuous batching with a token budget and hashed prefix caching, over a store of tiers.

Knows the store by its seam (`kvstore.connector`); nothing of HTTP and of the command.

- `core/`: requests, scheduler, batch
- `model/`: the model and what runs a step on it
- `text/`: templates, prompts, answers' text
- `sessions/`: conversations as token ids
- `process/`: the loop in a process of its own
- `builtin/`: the built-in model's files
- `admin`: eviction, deletion of sessions, and the requests of other processes
- `async_engine`: `AsyncEngine`: the engine in a thread of its own, and its sessions as `AsyncChat`
- `blocking`: the library's blocking verbs, over an engine here or in another process
- `config`: the engine's options, built once and checked
- `engine`: `Engine`: the step loop and the public interface
- `lifetime`: how an engine ends: closed, dropped, at the interpreter's exit
- `outputs`: what a caller gets back: choices, usage, pieces of a stream
- `sampling_params`: how a request is sampled and when it stops
- `stats`: what an engine shows of itself
- `storage`: from the engine's options to the tiers below HBM

Decisions:

`hbm="auto"` on a CPU takes a quarter of the available memory, at most four times `max_num_seqs` full windows. On
CUDA it leaves room for graphs and for activations that wait to be saved, and takes no more than 16 times
`max_num_seqs` full windows: a card would hold millions of blocks of a small model, and Python keeps books on each.

A turn that loses its reader is not stored: its person never saw it acknowledged, so asking again starts clean; what
was computed stays cached. A turn that is stopped on purpose is stored with what was said.

Long texts are tokenized two at a time, off the event loop: a text takes about two hundred times its size meanwhile.
Short ones go by them. A text that fits no window, even in the longest tokens there are, is refused before it waits
for anything.
"""
