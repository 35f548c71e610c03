"""A conversation as token ids: its turns, its window, and its history when it comes back as text.

Loads no torch.

- `chat`: a session: send, stream, fork; durable turn by turn
- `chats`: sessions by their ids: opened, and hinted at
- `core`: what conversations need of whatever computes
- `recall`: the prompt of a history, with the ids of the answers that are known
- `recall_ids`: digests by which histories and answers are found again
- `recall_lines`: recent conversations by these digests, within a bound
- `window`: what of a session is in the model's window, and how it is truncated

Decisions:

A turn is never tokenized again: a session's next prompt is its ids plus the ids of what the template adds.
Tokenizing an answer's text need not give the ids that were sampled. A template that rewrites history is detected,
and the conversation is rendered anew.

Truncation cuts in id space. The template's text between turns tells where a turn begins. When prompt and answer
would exceed the window, whole turns go, from the oldest on, down to half the window; the system prompt stays. What
is kept keeps its ids, and its KV by a splice.

Histories that come back as text become the ids they were. The template's render is split at the answers that are
known, by a keyed digest of the history up to them, or else of their text; everything between is encoded as it was.
No text is kept, and the table survives a restart. Recognised conversations take 16 MB at most, as counted.
"""
