"""The edge: HTTP, and the command line. Knows the engine's public interface, and of the store its files and commands.

- `settings/`: flags, files, environment
- `http/`: what surrounds every route
- `api/`: routes
- `command/`: the `kvstore` command
- `app`: joins all routes, and what happens around each: request id, errors, access, counts
- `server`: `kvstore serve`: port, loading, signals, orderly end
"""
