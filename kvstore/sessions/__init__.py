"""Durable conversations, and the answers that are recognised: data, which are never given up to make room.

Knows LMDB and token ids; no KV, no tier and no engine.

- `answer_tables`: how they lie on disk, within a bound
- `answers`: token ids of answers by keyed digests, across restarts
- `check`: a walk over all of them
- `marker`: which file holds the sessions, told beside it
- `record`: what a session is, its bytes, and how turns add up
- `repair`: which turns of a damaged one are whole, and how they become the session again
- `storage`: where these tables are: LMDB, or memory
- `store`: durable sessions: group commits in a thread
- `tables`: what one transaction does with sessions
"""
