"""The edge: HTTP and the command line. It knows the engine's public interface, and the store's files and commands.

- `settings/`: flags, files, environment
- `http/`: what surrounds every route
- `api/`: routes
- `command/`: the `kvstore` command
- `app`: joins all routes
- `replicas/`: several servers behind Ray Serve
- `server`: `kvstore serve`: port, loading, signals, orderly end

Decisions:

All memory of traffic is bounded. The server keeps recognised conversations (16 MB and what the allocator wastes) and
the ids of the 256 sessions used last (2 million ids, or 80 MB). The engine's process keeps the conversations that
eviction knows (about a kilobyte each; 10,000 and two for each block of the tiers, at most a million) and an entry for
each block on disk. A test checks that memory does not grow with requests, answers and sessions.
"""
