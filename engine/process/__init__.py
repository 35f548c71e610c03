"""The core in a process of its own: token ids and calls between two processes.

Knows no HTTP.

- `channel`: messages through a socket pair, without a thread of their own
- `core`: a core that is used through a channel, in that process
- `life`: one life of it: started, greeted, spoken to, ended
- `link`: that process watched, started again, closed; the requests in it
- `outputs`: text and stop strings of running requests, made on this side
- `pulse`: signs of life of that process, and what follows when none comes
- `remote`: `RemoteCore`: a `Core` that is in another process
- `wire`: what the two say to each other

Decisions:

The core may run in a process of its own, as vLLM's does. Requests, updates and calls share one socket pair, which the
event loop reads itself; a call has a number, and whoever waits for its answer waits in a thread. Messages are
msgspec's; nothing is pickled. It wins with few clients (8 to 15 % between tokens), and it can be started again.

It dies with its parent (parent-death signal and end of file). A thread in it writes a byte twice a second into a
pipe, unless one round of the loop takes too long; the front counts silence and kills a process that gives no sign.
It counts in ticks of its own, so time in which the whole machine slept is none. After a death it is started again
at once, then with growing delays.

Idle compute threads spin for microseconds, not milliseconds: on a machine of few cores the server wants the core
that OpenMP's idle thread spins on. That costs 2 to 8 % alone, and saves a factor of 15 beside a busy process.
"""
