"""Compiled kernels for CPUs: C code, the modules that compile and bind it, and the threads that run it.

Without a compiler, torch operations do the same.

- `attention`: attention, and rotation and write of any step (`decode.c`; `prefill.c`, if the CPU multiplies bfloat16)
- `block_copy`: copies blocks between arena and HBM in one pass (`copy.c`)
- `masks.c`: token masks; `kernels/token_masks.py` binds it
- `exact12.c`: the lossless codec of stored bfloat16; `kernels/exact12.py` binds it
- `int8.c`: the lossy codec of stored bfloat16; `kernels/int8.py` binds it
- `layer`: norms, and products if the CPU multiplies bfloat16 (`layer.c`)
- `native`: compiles the C code of this folder once, if there is a compiler
- `states`: short convolutions and the gated delta rule of layers with a state (`states.c`)
- `threads`: binds two computing threads to two processors, and uses one beside other work (`threads.c`); touches the
  arena's memory ahead of its use
- `team.h`: work that a thread shares with its helpers (`threads.c`)
- `tiles.h`, `vectors.h`: tiles (AMX); vectors and rounding, for all C code

Decisions:

Operations that torch lacks are written in C, which the machine's own compiler compiles once into the user's cache:
attention with its rotation and writes, norms, copies of blocks between arena and HBM. Before, a third of a small
model's decode step was small operations, and moving blocks took three passes. Without a compiler, and for types and
shapes that the C code does not know, torch does the same. KV that is moved and rotated has the same bits in both.

Products are C, too, if the processor multiplies bfloat16. A decode step is bound by reading weights from memory, and
oneDNN does not fetch them ahead (it reads 20 GB/s of a possible 27). With tiles (AMX), C takes up to 32 rows and oneDNN
more; with vectors (AVX-512), C takes any number of rows. Threads take blocks of columns one by one, so a thread whose
processor has other work takes fewer. The weight stays as oneDNN has packed it. When it is packed, the layout is
compared with the weight, number by number; when the model is loaded, a layer's results are compared with oneDNN's. If
anything differs, oneDNN is used.

A prefill attends over the pages in place. Torch's fused attention would need the pages gathered, and a mask of every
query with every key. C does this for bfloat16 without soft cap and sinks, and heads of 32 to 256; torch does the rest.

The gated delta rule goes token by token, also over a prompt: 64 columns of a head's state stay in the first cache, so
a token costs three passes of multiply-adds and nothing else. transformers computes chunks of 64 tokens by matrix
products, an inverse and some twenty passes over memory, in ten times the time (bench/LOG.md). States are changed in the
pool: a batch does not gather them and write them back.

In the engine's own process, two computing threads are bound to two processors. Otherwise the system may wake a helper,
which slept during a pause, on the processor of the thread that waits for it; a turn then took up to twice as long. An
embedded engine leaves this to its program, and more than two threads are left to the system.

If C computes all products of a model (with vectors, not tiles), it has helpers of its own instead of OpenMP's. A region
of OpenMP ends when all its threads have reached its end, even a thread that has nothing to do and waits for a
processor. Here the caller waits only for items that are being computed, and a helper offers its processor to others
between two items, so it is not taken away in the middle of one. A prompt beside one busy process went from 0.43 of its
speed alone to 0.6 of a higher speed. Meanwhile torch computes with one thread: helpers of two kinds would compete for a
processor.

Beside other work, one of two threads decodes: items of few rows are so short that waiting for one of them takes most of
a step. The system counts how long a thread was ready but had no processor. If that is a quarter of the time, one thread
computes the steps of up to 16 rows alone; it reads weights nearly as fast as two. After one to eight seconds both are
tried again. Both compute prompts.
"""
