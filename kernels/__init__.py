"""Device code. Imports nothing: transformers probes any package that answers to the name `kernels`.

- `attention`: paged attention: which implementation computes it, by device and by what is installed
- `attention_torch`: paged attention in torch operations
- `block_copy`: blocks between arena and paged cache, rotated on the way
- `device`: how small tensors come to a device
- `paged_batch`: one step's layout for attention, on the host and on the device
- `reference`: plain twins of the kernels, the oracle of the tests
- `write_kv`: rotates a step's queries and keys, and puts new keys and values into the paged cache
"""

__version__ = "0"
