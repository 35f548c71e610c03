"""Device code. Imports nothing, because transformers probes any package with the name `kernels`.

- `attention`: paged attention: which implementation computes it, by device and by what is installed; in torch
- `exact12`: the lossless codec of stored bfloat16, in C or numpy; loads no torch
- `int8`: the lossy codec of stored bfloat16, in C or numpy; loads no torch
- `kv`: moves keys and values, and rotates keys: a step's into the paged cache, blocks between arena and cache
- `paged_batch`: one step's layout for attention, on the host and on the device, and small tensors on their way there
- `reference`: plain twins of the kernels, which the tests compare with
- `token_masks`: which tokens may be drawn, applied to logits

Decisions:

Every kernel has a plain twin in `reference` and must match it in tests: bit for bit if it moves or rotates KV, within
rounding if it computes attention. Keys are rotated in HBM and raw everywhere else: attention needs rotated keys, and a
stored key must serve any position. Loading rotates with the model's own rounding (cos and sin in the model's dtype,
each product rounded, then the sum), so a loaded block is bit-identical to the computed one.

On a CPU, attention in torch reads a request's blocks in place if they are in one run, and gathers them otherwise.
Decode requests of similar length attend in one call. On a CPU without AMX, prefill in 16-bit floats uses matrix
products over pieces of 128 queries: 8.8 ms against 15.5 for torch's fused attention (1,024 tokens, 12 heads, bf16, Zen
4). The scores are then rounded to 16 bits, as in transformers' eager attention. In float32 and with AMX the fused
attention is used.
"""

__version__ = "0"
