"""The engine's loop in a process of its own: token ids and calls between two processes.

Knows no HTTP.

- `calls`: blocking calls, carried out there
- `channel`: messages through a socket pair, without a thread of their own
- `core`: the program in that process
- `life`: one life of it: started, greeted, spoken to, ended
- `link`: that process watched, started again, closed; the requests in it
- `outputs`: text and stop strings of running requests, made on this side
- `parts`: sessions, answers and connector, each verb a call
- `pulse`: signs of life of that process, and what follows when none comes
- `remote`: `RemoteEngine`: an `Engine` whose steps run in another process
- `spinning`: how long a compute thread without work spins
- `wire`: what the two say to each other
- `wire_calls`: the table of calls and their types
"""
