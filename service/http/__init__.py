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
"""
