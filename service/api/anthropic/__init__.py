"""Anthropic's routes: messages, and how many tokens they have.

- `message_schema`: bodies, answers and errors of /v1/messages
- `messages`: /v1/messages and /v1/messages/count_tokens

They answer a history that belongs to no session, as /v1/chat/completions does, in other words.
"""
