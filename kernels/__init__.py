"""Device code. Imports nothing: transformers probes any package that answers to the name `kernels`.

- `attention`: paged attention: which implementation computes it, by device and by what is installed
- `attention_torch`: paged attention in torch operations
- `block_copy`: blocks between arena and paged cache, rotated on the way
- `device`: how small tensors come to a device, and back
- `paged_batch`: one step's layout for attention, on the host and on the device
- `reference`: plain twins of the kernels, the oracle of the tests
- `write_kv`: rotates a step's queries and keys, and puts new keys and values into the paged cache

Decisions:

Every kernel has a plain twin in `reference` and must match it in tests: bit for bit what moves and rotates KV,
within rounding what attends. Keys are rotated in HBM and raw everywhere else: attention wants them rotated, a
stored one must serve any position. Loading rotates with the model's own rounding (cos and sin in the model's dtype,
each product rounded, then the sum), so a block that comes back is bit-identical to the one that was computed.

On a CPU, attention in torch reads a request's blocks in place where they lie in one run, else gathers them; decode
requests of similar length attend in one call. Prefill in 16-bit floats goes through matrix products over pieces of
128 queries where the CPU has no AMX: 8.8 ms against 15.5 for torch's fused attention (1,024 tokens, 12 heads, bf16,
Zen 4). The scores are then rounded to 16 bits, as in transformers' eager attention. In float32 and with AMX the
fused attention is used.
"""

__version__ = "0"
