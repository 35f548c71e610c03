"""`/chat` and `/sessions`: durable conversations.

- `routes`: list, show, delete, fork, prefetch, pin, truncate, edit, stop
- `turns`: POST /chat, and what a turn of a session does, from its admission to its stored answer

Decisions:

An `Idempotency-Key` is stored with its turn. Without a session id it also determines the session, by a keyed digest, so
a retry finds what the first attempt made. Another tenant's session gets the same answer as one that does not exist.
"""
