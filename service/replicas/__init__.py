"""Several servers behind Ray Serve, which starts them, checks them, scales them and answers at one port.

- `routing`: which replica a request should go to, and one answer made of all replicas' answers
- `ingress`: takes requests from Ray's HTTP proxy and passes them to replicas
- `replica`: one server, on a socket and in a store of its own
- `app`: the application as Ray deploys it, and `kvstore serve --replicas`

Ray is imported where it is used: all else works without it.
"""
