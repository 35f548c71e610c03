"""Durable conversations, and the answers that are recognised: data, which are never given up to make room.

Knows LMDB and token ids; no KV, no tier and no engine.

- `answers`: token ids of answers by keyed digests, across restarts, within a bound
- `check`: a walk over all of them
- `marker`: which file holds the sessions, told beside it
- `record`: what a session is, its bytes, and how turns add up
- `repair`: which turns of a damaged one are whole, and how they become the session again
- `storage`: where these tables are: LMDB, or memory
- `store`: durable sessions: group commits in a thread
- `tables`: what one transaction does with sessions

Decisions:

Sessions are data, KV is a cache. Each turn is one record with the exact token ids it added and the chain it stands
on, committed with full sync before the turn's last piece is handed out: by a thread of its own, in groups, so that
the engine's step never waits. KV may be lost and is computed again; an acknowledged turn may not.

The store keeps, per block, which sessions refer to it. Deleting a session is one transaction that writes a
tombstone with the blocks that nobody else refers to; these go from every tier, also after a crash in between.

Sessions are never begun anew in silence. Their file has a random name, which stands in it and beside it: a file
that is missing, or another one, is told until it is back or given up. Of a damaged session the turns up to the
first damaged one are a state; a repair gives that state a new number, so that whoever still holds the old one is
refused, and keeps the other records under it.

Answers are found again by keyed digests of the history before them, or of their text; no text is kept, and the
table is bounded.
"""
