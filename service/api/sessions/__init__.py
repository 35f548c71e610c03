"""`/chat` and `/sessions`: durable conversations.

- `chat`: POST /chat
- `routes`: list, show, delete, fork, prefetch, pin, truncate, stop
- `turns`: what a turn of a session does, from its admission to its stored answer

Decisions:

An `Idempotency-Key` is stored with its turn. Without a session id it also determines the session, by a keyed digest, so
a retry finds what the first attempt made. Another tenant's session gets the same answer as one that does not exist.
"""
