"""A rank that stands for an actor of Ray: its number, and where the first rank listens with which secret."""

import sys

from kvstore.engine.ranks.on_ray import RankActor

rank, host, port, key = sys.argv[1:]
RankActor().run(int(rank), host, int(port), bytes.fromhex(key))
