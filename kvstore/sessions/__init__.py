"""Durable conversations, and the answers that are recognised: data that is never evicted.

Knows LMDB, Redis and token ids; no KV, no tier and no engine.

- `answers`: token ids of answers by keyed digests, across restarts, within a bound
- `check`: a walk over all of them; what leads to a whole session is made again
- `forgetting`: takes messages back, with the blocks that were computed from them
- `marker`: a note beside it of which file holds the sessions
- `memory`: tables in memory, and which sessions stay in them
- `record`: what a session is, its bytes, and how turns add up
- `remains`: what is whole of a damaged session, and forks, which go on from there
- `shared/`: the tables in a Redis that several servers share
- `sharing`: what concerns other servers: who may write, who must carry out a deletion
- `storage`: tables in LMDB; group commits in a thread, and reads, with all that can fail
- `store`: durable sessions: turns, forks and deletions by their keys; expiry, checks, lost files, numbers
- `tables`: what one transaction does with sessions

Decisions:

Sessions are data, KV is a cache. Each turn is one record with the exact token ids it added and the chain it stands on,
committed with full sync before the turn's last piece is handed out: by a thread of its own, in groups, so that the
engine's step never waits. KV may be lost and is computed again; an acknowledged turn must not be lost.

Whatever is stored of a session at one time is one transaction: turns, what a fork begins with, a time to live, a name.
A session that has expired is not there for whoever reads, so nobody has to delete it first; only a turn that began
before is still stored.

The store keeps, per block, which sessions refer to it. Deleting a session is one transaction that writes a
tombstone with the blocks that nobody else refers to; these go from every tier, also after a crash in between.

An edit is a turn of its own that says what to change; what was there stays, and a fork of the turn before has it.
Forgetting is the exception: it rewrites the turns from the first changed message on and leaves a tombstone, in one
transaction.

A store of sessions is never silently replaced by an empty one. Its file has a random name, kept in it and beside it: a
missing or different file is reported until it is back or given up. Of a damaged session the turns up to the first
damaged one are a state, from which a fork goes on; the session stays as it is until it is deleted.

Answers are found again by keyed digests of the history before them, or of their text; no text is kept. They are three
more tables, in a file of their own: a cache, and bounded.
"""
