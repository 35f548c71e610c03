"""The store under engines that people already run. Modules with a host's name import it; a host loads them by name.

- `model_folder`: where a model's files lie on this machine
- `rates`: load or compute, for hosts that tell little
- `sglang`: `KVStoreBackend`, the storage below SGLang's hierarchical cache
- `sglang_pages`: pages of SGLang's host pools as blocks
- `transfers`: jobs of many blocks between a host's memory and a store
- `vllm`: `KVStoreTier`, a secondary tier of vLLM's tiered offloading
- `vllm_cpu`: that offloading on vLLM's CPU backend
- `vllm_identity`: what vLLM's KV depends on beside its keys, and settings that hurt
- `vllm_keys`: the keys of a request of vLLM in their order
- `vllm_metrics`: what the tier tells vLLM's metrics
- `vllm_policy`: `KVStorePolicy`, who stays in vLLM's own memory tier
- `waiting`: a store for hosts whose threads wait
- `wishes`: what a request says about its conversation

Decisions:

A tier, not a connector. vLLM's tiered offloading already moves KV off the device and back, with groups of layers,
preemption and metrics; a tier moves bytes between one memory and its store, so little breaks with vLLM's next release.

A key of vLLM holds tokens, their history, salt, adapters and images, but not the weights: after another file was put
under the same name, old KV was found and answers were wrong. So weights, configuration, dtype, layout, sizes, the
shape of the parallelism and vLLM's version are the namespace of the blocks.

Bytes stay as vLLM has them, its keys rotated: what comes back is bit for bit what was computed.

Load or compute is decided at each key that is looked up, since keys come one by one: a history is loaded up to where
it would take noticeably longer than computing.
"""
