"""Several servers behind Ray Serve, which starts them, checks them, scales them and answers at one port.

- `affinity`: which replica a request should go to, from the session or the history that it names
- `ingress`: takes requests from Ray's HTTP proxy and passes them to replicas
- `everyone`: one answer made of all replicas' answers
- `replica`: one server, on a socket and in a store of its own
- `app`: the application as Ray deploys it, and `kvstore serve --replicas`

Ray is imported where it is used: all else works without it.
"""
