"""What processes of ours have in common, whatever they compute: start, channel, signs of life, end, restarts.

Knows no HTTP, no core and no rank.

- `channel`: messages through a socket pair, without a thread of their own
- `lines`: warnings of a process that writes no log, one line each
- `parent`: how a process ends with its parent
- `pulse`: signs of life of a process, and its killing when none come
- `readiness`: what the reader of messages waits for
- `restarts`: whether and when a process that ended is started again
- `spawn`: starts a process
- `wire`: exceptions as plain data

Decisions:

A process dies with its parent (parent-death signal and end of file). A thread in it writes a byte twice a second into a
pipe, unless one round of the loop takes too long. The front counts silence, and kills a process that gives no sign. It
counts its own ticks, so time in which the machine slept does not count. A process that died is restarted at once, then
with growing delays.

Idle compute threads spin for microseconds, not milliseconds: on a machine with few cores, the server needs the core
that OpenMP's idle thread spins on. That costs 2 to 8 % alone, and saves a factor of 15 beside a busy process.
"""
