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
"""
