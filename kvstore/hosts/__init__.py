"""The store as a tier of engines that people already run. A module with a host's name imports that host, which loads
the module by its name.

- `given`: what is read of a host's objects, none of it optional; where its model's files lie on this machine
- `jobs`: what a host reads or writes together, from and into its memory; a store for hosts whose threads may block
- `read_ahead`: sessions whose histories are read while their requests wait; a file that keeps what a process has
  learned
- `sglang`: `KVStoreBackend`, the storage below SGLang's hierarchical cache
- `sglang_pages`: pages of SGLang's host pools as blocks
- `vllm`: `KVStoreTier`, a secondary tier of vLLM's tiered offloading, and the connector that shows it the configuration
- `vllm_cpu`: the same offloading on vLLM's CPU backend
- `vllm_identity`: what vLLM's KV depends on beside its keys, and settings that hurt
- `vllm_keys`: the keys of a vLLM request in order
- `vllm_memory`: the file of vLLM's memory tier, when a killed vLLM has left it behind
- `vllm_metrics`: what the tier reports to vLLM's metrics
- `vllm_policy`: `KVStorePolicy`, which decides what stays in vLLM's own memory tier
- `wishes`: what a request says about its conversation

Decisions:

A tier, not a connector of our own: ours is vLLM's, and only makes its configuration known while it is built, as vLLM
hands that to no tier. vLLM's tiered offloading already moves KV off the device and back, with groups of layers,
preemption and metrics. A tier only moves bytes between one memory and its store, so little breaks with vLLM's next
release.

A vLLM key covers tokens, their history, salt, adapters and images, but not the weights: when another file was put under
the same name, old KV was found and answers were wrong. So weights, configuration, dtype, layout, sizes, the shape of
the parallelism and vLLM's version form the namespace of the blocks.

Bytes are stored as vLLM has them, with rotated keys: what comes back is bit for bit what was computed.

Whether to load or to compute is decided at each lookup, since keys come one by one. A history is loaded up to the point
where loading would take noticeably longer than computing.
"""
