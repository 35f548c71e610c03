"""`kvstore plan`: how large the tiers should be.

- `chart`: hit rate against capacity, in the terminal and as a picture
- `run`: `kvstore plan`: replays traffic at several sizes of the tiers
- `source`: what it replays: a trace's file, or a store's own history
- `tables`: what it prints: table, notes, advice
"""
