"""`kvstore plan`: how large the tiers should be.

- `run`: `kvstore plan`: replays traffic at several sizes of the tiers
- `source`: what it replays: a trace's file, or a store's own history
- `tables`: what it prints and draws: table, notes, advice, hit rate against capacity
"""
