"""Routes outside sessions and OpenAI's protocol, and what all handlers share.

- `sessions/`: `/chat` and `/sessions`
- `openai/`: OpenAI's routes
- `anthropic/`: Anthropic's
- `admin`: the administrator's routes
- `asking`: what a request may want of the form of its answer: tools, formats, variables of the chat template
- `edge`: /metrics, version, models, tokens
- `exchange`: a request and its answer: what every handler can reach, what is known of one request, what happens around
  each handler, and one way to answer, whole or as events, in the words of a route's dialect
- `field_errors`: what is wrong with a JSON body, in words
- `health`: /health, its like and /ready, and lines in the log when what they tell changes
- `metrics`: the page of /metrics, and the engine's last counters
- `naming`: names that clients give to conversations: headers and fields in one table
- `openapi`: /openapi.json from the table of routes and the types of bodies
- `page`: the web page's static files
- `prefill`: prompts of other servers, computed here
- `schema`: JSON bodies: limits, bounded types, unknown fields, messages that name the field; usage and times

Decisions:

Bodies are msgspec structs: bounds are types, so the description at /openapi.json is what is checked, and a fuzzer
compares the two in the tests.

What would change an answer and is not done is refused, not ignored: chat templates in a request, other constraints
than formats. So are near misses of a name that the body has. All other unknown fields are ignored, as
clients of other servers expect. Sampling values that a request does not give come from the model's
`generation_config.json`.

The web page's files need no key: they hold no data, and a browser cannot send a key before it has the page. /health,
its like and /ready need none either. Everything else does; a test tries every route. The page renders an answer's
Markdown but not its HTML: tags show as text, pictures become links, and a sanitiser behind the parser allows only a
short list of elements and http, https and mailto links. While an answer streams, finished blocks stay as they are, and
the last one is drawn at most once a frame.
"""
