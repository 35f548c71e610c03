"""What surrounds every route: who is let in, how many, how long, and what is logged and said of failures.

Knows no route.

- `access`: keys, tenants, Host and Origin
- `connection`: one TCP connection: deadlines of heads and readers, the cap
- `descriptors`: the limit on open files raised, and a line a while when connections cannot be accepted
- `errors`: errors in OpenAI's shape, and which exception becomes which
- `fields`: fields that a body does not have: which are refused, and which ignored
- `limits`: who runs, who waits, how long a request may take
- `logs`: one line a request, text or JSON
- `routes`: what a route declares

Decisions:

aiohttp, with what it lacks beside it: it has no deadline for heads and none for readers that stop reading. A
disconnect cancels the handler, which ends its request within a step.

A request's time is over for its client first. The handler is a task of its own, gets a second to give back what it
holds, and then goes on without its client: turns wait for the engine to let go, which it may never do. Its place in
the limits and its session stay taken until then, that is until the engine's process answers or is killed.

Limits count sequences, not requests: a request counts by the work that it asks for. Of several tenants none may
hold more than half of what the others leave of the queue.

Other hosts and origins are named, never guessed: a `Host` or `Origin` that was not allowed is refused (DNS
rebinding, requests that a foreign page forges), `X-Forwarded-*` headers are not read, and CORS answers repeat one
exact origin, with no wildcard and no credentials. An allowed origin's host is an allowed host: who trusts the one
trusts the other.
"""
