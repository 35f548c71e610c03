"""What surrounds every route: access, limits, deadlines, logs, and the shape of errors.

Knows no route.

- `access`: keys, tenants, Host and Origin
- `errors`: errors in OpenAI's shape, which exception becomes which, and a route with the errors that it may answer
- `listening`: the certificate of HTTPS, the file of a Unix socket
- `limits`: how many connections, how slow these may be; how much runs and waits, how long a request may take
- `telling`: what is told of requests: one line in the log, text or JSON; counts; spans for a collector

Decisions:

aiohttp has no deadline for heads, and none for readers that stop reading; `limits` adds both. A disconnect cancels
the handler, which ends its request within a step.

When a request's time is over, its handler is cancelled and tells the client. The answer is a task of its own: it is
told to end, and goes on without its client, because a turn waits for the engine, which may never answer. Until the
engine's process answers or is killed, the answer keeps its place in the limits and its session.

Limits count sequences, not requests: a request counts by the work that it asks for. Where there are several tenants,
none may hold more than half of the queue that the others leave free.

Other hosts and origins are named, never guessed: a `Host` or `Origin` that was not allowed is refused (DNS rebinding,
requests that a foreign page forges), `X-Forwarded-*` headers are not read, and CORS answers repeat one exact origin,
with no wildcard and no credentials. The host of an allowed origin is an allowed host.
"""
