"""OpenAI's routes: chat completions, completions and responses.

- `chat`: /v1/chat/completions
- `completions`: /v1/completions
- `response_schema`: bodies and answers of /v1/responses
- `responses`: /v1/responses, on the same sessions as /chat
- `stateless`: an answer to a history that belongs to no session, and what answers have in common
"""
