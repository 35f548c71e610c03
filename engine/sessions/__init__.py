"""Conversations as token ids: turns, windows, and histories that come back as text.

Loads no torch.

- `chat`: a session, and its place in the store: send, stream, truncate, edit, fork; durable turn by turn; sessions by
  their ids
- `edits`: messages that are removed or replaced, and what becomes of the window's ids and KV
- `recall`: a history's prompt, with the original ids of known answers; recent conversations by keyed digests
- `spans`: texts that a client names, whose KV is computed once, alone, and reused wherever they stand
- `window`: what of a session is in the model's window, and how it is truncated; a turn's prompt and its record

Decisions:

A turn is never tokenized again: a session's next prompt is its ids plus the ids of what the template adds. Tokenizing
an answer's text need not give the ids that were sampled. A template that rewrites history is detected, and the
conversation is rendered again.

Truncation cuts in id space. The template's text between turns tells where a turn begins. When prompt and answer would
exceed the window, the oldest turns are dropped, down to half the window; the system prompt stays. The rest keeps its
ids, and its KV by a splice. Reasoning that a turn drops goes in the same way, and in the same splice.

An edit keeps the ids of all turns that it does not touch, and says what to change in a turn of its own. Where a message
is replaced, everything up to it is computed before the turns behind it are spliced.

A span is tokenized alone and computed alone, behind the first token of the prompt. A prompt with spans is made from
its beginning: what stands before a span is computed and stored, then the span is spliced behind it. So the chain of a
prompt depends on its ids and spans alone, and comes out the same in every turn. A session refers to the blocks of its
spans' own chains, which are deleted with the last session that does.

Histories that come back as text become their original ids. Known answers are found by a keyed digest of the history up
to them, or else of their text. The template's render is split there, and everything between is encoded. No text is
kept, and the table survives a restart. Recognised conversations take 16 MB at most, as counted.
"""
