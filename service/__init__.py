"""The edge: HTTP, and the command line. Knows the engine's public interface, and of the store its files and commands.

- `settings/`: flags, files, environment
- `http/`: what surrounds every route
- `api/`: routes
- `command/`: the `kvstore` command
- `app`: joins all routes, and what happens around each: request id, errors, access, counts
- `server`: `kvstore serve`: port, loading, signals, orderly end

Decisions:

What is remembered of traffic has a bound. In the server: recognised conversations, 16 MB and what the allocator
wastes, and the ids of the 256 sessions used last, 2 million ids or 80 MB. In the engine's process: conversations of
which eviction knows, about a kilobyte each, 10,000 and two for each block of the tiers, a million at most, and an
entry for each block on disk. A test counts that requests, answers and sessions do not grow.
"""
