"""What processes of ours have in common, whatever they compute: start, channel, signs of life, end.

Knows no HTTP, no core and no rank.

- `channel`: messages through a stream socket; what each process is told first, its failure, exceptions as plain data
- `child`: a process that computes for this one, seen from both ends

Decisions:

There is one channel to a process, and nothing beside it: its first message says what to be, an empty one twice a second
is a sign of life, and its end is the end of either. So a process of another machine differs in two things: others have
started it, and a signal does not reach it. One that others have not started is this one's child, whose end is seen by
a `pidfd`, and dies with its parent (parent-death signal, and the end of the channel).

A thread in a process gives the sign, unless one round of the loop takes too long. The other end counts silence, and
kills a process of which nothing came and nothing lies unread. It counts its own ticks, so time in which the machine
slept does not count.

Idle compute threads spin for microseconds, not milliseconds: on a machine with few cores, the server needs the core
that OpenMP's idle thread spins on. That costs 2 to 8 % alone, and saves a factor of 15 beside a busy process.
"""
