"""Compiled kernels for CPUs: C code, what compiles and binds it, and the threads that run it.

Without a compiler torch operations do the same.

- `block_copy`: blocks between arena and HBM in one pass (`copy.c`)
- `decode`: rotation, write and attention of a decode step, the first two of any step (`decode.c`)
- `first_touch`: touches the arena's memory ahead of its use
- `layer`: norms, and products where a CPU multiplies bfloat16 (`layer.c`)
- `native`: compiles the C code of this folder once, where there is a compiler
- `prefill`: attention of many tokens over their pages, where a CPU multiplies bfloat16 (`prefill.c`)
- `threads`: gives two computing threads one of two processors each, and does with one beside other work (`threads.c`)
- `team.h`: work that a thread shares with those that help it (`threads.c`)
- `tiles.h`, `vectors.h`: tiles (AMX); vectors and rounding, for all of it

Decisions:

What torch has no operation for is C, compiled once by the machine's own compiler into the user's cache: attention
with its rotation and writes, norms, blocks between arena and HBM. A decode step of a small model was one third
small operations; moving blocks was three passes. Without a compiler, and for types and shapes it does not know,
torch does the same; what moves and rotates KV has the same bits in both.

Products are C, too, where the processor multiplies bfloat16: a decode step is bound by the memory that weights are
read from, and oneDNN does not fetch them ahead (20 GB/s where 27 can be had). With tiles (AMX) that goes for up to
32 rows, and oneDNN has the rest; with vectors (AVX-512) for any number of rows. Blocks of columns are taken one by
one, so a thread whose processor has other work takes fewer. The weight stays as oneDNN has packed it: the layout is
compared with the weight number by number when it is packed, and a layer's results with oneDNN's when the model is
loaded; what differs stays with oneDNN.

A prefill attends over pages where they lie: torch's fused attention needs the pages gathered, and a mask of every
query with every key. Bfloat16 without soft cap and sinks, heads of 32 to 256; the rest is torch's.

In the engine's own process two computing threads have one of two processors each: a helper that slept during a
pause may be woken on the processor of the thread that waits for it, and a turn then took up to twice as long. An
embedded engine leaves that to its program, and with more threads they are left to the system.

Where C computes all products of a model (vectors, no tiles), it has helpers of its own instead of OpenMP's. A region
of OpenMP ends when all its threads have come to its end, also one that others keep from its processor and that has
nothing to do. Here the caller waits for items that are being computed, for nothing else, and a helper offers its
processor to others between two items, before it is taken away in the middle of one. A prompt beside one busy process
went from 0.43 of its speed alone to 0.6 of a higher one. Torch computes with one thread meanwhile: helpers of two
kinds would keep each other from their processor.

Beside other work one thread of two decodes: items of few rows are so short that waiting for one of them is most of a
step. The system counts how long a thread was ready and had no processor; where that is a quarter of the time, one
thread alone takes the steps of up to 16 rows, as it reads weights nearly as fast as two. Both are tried again after
one to eight seconds. Prompts are computed by both.
"""
