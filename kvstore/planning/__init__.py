"""How large tiers should be: traces of traffic, replayed at several sizes.

Knows the store's own classes, no engine and no model.

- `replay`: a trace through one server, on a virtual clock: when requests come, who waits, who runs, and for how long;
  and what it counts
- `replay_config`: what a replay is asked and what it answers
- `server_blocks`: the requests and blocks of that server, in the store's own classes
- `sizing`: which sizes to try, and the knee
- `trace_formats`: reads traces from files
- `traces`: what requests ask of a cache, by names of blocks
- `virtual_io`: time and a disk that take as long as rates say and move no byte: a `KVStore` for replays of traces

Decisions:

A store records when its requests came and how long they were: no token, no text. So a plan can answer for the
store's own traffic. What is replayed runs on a virtual clock, so a plan takes seconds and gives the same figures
every time. Rates of the machine are those that the store has measured, else round ones, and the answer says which.
"""
