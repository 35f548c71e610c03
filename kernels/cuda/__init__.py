"""Kernels for CUDA devices: Triton's, and those of others.

Imported only where they may run; the twins are in `kvstore.kernels.reference`.

- `attention`: paged attention on CUDA: one Triton kernel for decode and prefill, one that joins split contexts
- `flash`: prefill by the paged kernels of flash-attn or torch, tried before they are used
- `kv`: writes to the cache, loads and saves as Triton kernels, which read and write the arena over the bus

Decisions:

None of this has run on a GPU. In the tests, Triton's interpreter compares the kernels with their twins, and the
compiler makes machine code of them for sm_80 and sm_90. Figures about a GPU in comments are arithmetic.

Triton is one source for all cards, and can be tested without one. Without Triton, torch operations are used. One kernel
rotates queries and keys and writes the cache, so a token's heads are read once.

A kernel loads blocks over the bus: it reads pinned memory and rotates in registers, with 16 programs on as many
multiprocessors. So scattered blocks need no gathering, and rotated keys no second pass. `bench.gpu` compares it with
the copy engine and a rotation afterwards; the faster one is to stay. Saves write raw keys and values to arena blocks:
layers with the same strides in one launch, at 8 MiB of activations or once after a step.

Rotation rounds as torch does: float32 products and sum, each rounded to the model's dtype if the model does so, never
fused (`enable_fp_fusion=False`). With an FMA, a loaded key would differ from a computed one.

Prefill uses the fastest attention available: flash-attn 3, torch's own over block tables (from 2.13 on), else ours.
Each is tried on three small requests before it is used, because only the build knows which cards and sizes it supports.
Decode always uses ours: a graph needs a launch that fits any context, and a step that runs eagerly, because a request
loads, must agree with a replayed one (to rounding: they divide long contexts differently).
"""
