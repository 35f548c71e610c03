"""Compiled kernels for CPUs: C code, what compiles and binds it, and the threads that run it.

Without a compiler torch operations do the same.

- `block_copy`: the same on a CPU in one pass, by compiled code
- `decode`: rotation, write and attention of a decode step on a CPU by compiled code
- `first_touch`: touches the arena's memory on a CPU ahead of its use
- `layer`: norms, and products where a CPU multiplies bfloat16
- `native`: compiles the C code of this folder once, where there is a compiler
- `prefill`: attention of many tokens over their pages, on a CPU with tiles (AMX)
- `threads`: gives two computing threads one of two processors each, and does with one beside other work
- `write`: rotation and write of any step, the same way
- `copy.c`: that code, in C
- `decode.c`: the code of both, in C
- `layer.c`: that code, in C
- `prefill.c`: that code, in C
- `threads.c`: that code, in C
- `tiles.h`: how tiles are set and given back
- `vectors.h`: vectors and rounding, for all of it
"""
