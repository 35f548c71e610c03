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
- `recent_stats`: the engine's counters for /health and /metrics
- `schema`: JSON bodies: limits, bounded types, messages that name the field
- `sse`: server-sent events, with errors as events
- `usage`: token counts by tier, and times

Decisions:

Bodies are msgspec structs: bounds are types, so the description at /openapi.json is what is checked, and a fuzzer
compares the two in the tests.

What would change an answer is refused, not ignored: tools, response formats, chat templates in a request, guided
decoding and other constraints. So are near misses of a name that the body has. All other unknown fields are
ignored, as clients of other servers expect. What a request leaves open is the model's own `generation_config.json`.

The web page's own files need no key: a browser cannot send one before the page is there, and they hold no data. All
else but /health and /ready does, and a test goes through every route. The page makes elements of an answer's
Markdown, and no HTML of its HTML: tags are text, pictures are links, and a sanitiser behind the parser lets a short
list of elements and http, https and mailto links through. While an answer streams, blocks before the last one stay
as they are, and the last one is drawn once a frame at most.
"""
