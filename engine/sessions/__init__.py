"""A conversation as token ids: its turns, its window, and its history when it comes back as text.

Loads no torch.

- `chat`: a session: send, stream, fork; durable turn by turn
- `chats`: sessions by their ids: opened, and hinted at
- `recall`: the prompt of a history, with the ids of the answers that are known
- `recall_ids`: digests by which histories and answers are found again
- `recall_lines`: recent conversations by these digests, within a bound
- `window`: what of a session is in the model's window, and how it is truncated
"""
