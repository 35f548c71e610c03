"""`/chat` and `/sessions`: durable conversations.

- `chat`: POST /chat
- `chat_schema`: bodies and answers of /chat and /sessions
- `routes`: list, show, delete, fork, prefetch, pin, truncate, stop
- `running`: the turns that run, one a session
- `turns`: a turn of a session: whose, whether it is a retry, the answer as it comes

Decisions:

An `Idempotency-Key` is stored with its turn. Without a session it names the session too, by a keyed digest, so a
retry finds what the first attempt made. A session of another tenant is answered like one that never was.
"""
