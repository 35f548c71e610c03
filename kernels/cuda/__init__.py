"""Kernels for CUDA devices: Triton's, and those of others.

Imported only where they may run; the twins are in `kvstore.kernels.reference`.

- `attention`: paged attention on CUDA: decode and prefill in one Triton kernel, split contexts joined
- `flash`: prefill by flash-attn's or torch's own paged kernels, tried before used
- `kv`: both of them, and saves, as Triton kernels; the arena is read and written over the bus
- `triton_support`: whether there is Triton, and what its callers share

Decisions:

None of this has run on a GPU. Triton's interpreter runs the kernels against their twins in the tests, and the
compiler makes machine code of them for sm_80 and sm_90; numbers about a GPU in comments are arithmetic.

Triton is one source for all cards, and can be tested without any; without it torch operations are used. One kernel
rotates queries and keys and writes the cache: a token's heads are read once.

Loads go over the bus by a kernel that reads pinned memory and rotates in registers, 16 programs on as many
multiprocessors: scattered blocks cost no gathering, and rotated keys no second pass. `bench.gpu` compares it with
the copy engine and a rotation afterwards; the faster one is to stay. Saves write raw keys and values into arena
blocks, layers with the same strides in one launch, handed over at 8 MiB of activations or once after a step.

Rotation rounds as torch does: float32 products and sum, each rounded to the model's dtype where the model does so,
never fused (`enable_fp_fusion=False`). An FMA would make a loaded key differ from a computed one.

Prefill takes the fastest attention that is there: flash-attn 3, torch's own over block tables (from 2.13 on), else
ours. Each is tried on three small requests before it is used:
which cards and sizes a build supports only the build knows. Decode is always ours: a graph needs a launch that fits
any context, and a step that runs eagerly, since somebody loads, is to agree with a replayed one (to rounding: they
divide long contexts differently).
"""
