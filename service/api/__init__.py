"""Routes, bodies and answers that belong to no session and to no protocol of others; and what all handlers share.

- `sessions/`: `/chat` and `/sessions`
- `openai/`: OpenAI's routes
- `admin`: the administrator's routes
- `context`: what every handler can reach, and what is known of one request
- `edge`: health, version, models, tokens
- `engine_metrics`: what /metrics shows of the engine: tiers, failures, sessions
- `metrics`: /metrics: what is counted of requests and answers
- `openapi`: /openapi.json from the table of routes and the types of bodies
- `page`: the web page's static files
- `schema`: JSON bodies: limits, bounded types, messages that name the field
- `sse`: server-sent events, with errors as events
- `usage`: token counts by tier, and times
"""
