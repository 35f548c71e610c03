"""`kvstore plan`: how large the tiers should be.

- `run`: `kvstore plan`: finds the traffic and replays it at several sizes of the tiers
- `tables`: what it prints and draws: table, notes, advice, hit rate against capacity
"""
