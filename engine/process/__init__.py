"""The core in a process of its own: token ids and calls between two processes.

Knows no HTTP.

- `channel`: messages through a socket pair, without a thread of their own
- `core`: serves a core through a channel, in that process
- `life`: one life of that process: start, greeting, messages, end
- `lines`: warnings of a process that writes no log, one line each
- `link`: that process watched, started again, closed; the requests in it
- `outputs`: text and stop strings of running requests, made on this side
- `parent`: how that process ends with its parent
- `pulse`: signs of life of that process, and its killing when none come
- `readiness`: what the reader of messages waits for
- `remote`: `RemoteCore`: a `Core` that is in another process
- `restarts`: whether and when a process that ended is started again
- `wire`: the messages between the two

Decisions:

The core may run in a process of its own, as vLLM's does. Requests, updates and calls share one socket pair, which the
event loop reads itself. A call has a number; its caller waits for the answer in a thread. Messages are msgspec's;
nothing is pickled. It is faster with few clients (8 to 15 % between tokens), and it can be restarted.

It dies with its parent (parent-death signal and end of file). A thread in it writes a byte twice a second into a pipe,
unless one round of the loop takes too long. The front counts silence, and kills a process that gives no sign. It counts
its own ticks, so time in which the machine slept does not count. A process that died is restarted at once, then with
growing delays.

Idle compute threads spin for microseconds, not milliseconds: on a machine with few cores, the server needs the core
that OpenMP's idle thread spins on. That costs 2 to 8 % alone, and saves a factor of 15 beside a busy process.
"""
