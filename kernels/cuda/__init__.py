"""Kernels for CUDA devices: Triton's, and those of others.

Imported only where they may run; the twins are in `kvstore.kernels.reference`.

- `attention`: paged attention on CUDA: decode and prefill in one Triton kernel, split contexts joined
- `flash`: prefill by flash-attn's or torch's own paged kernels, tried before used
- `kv`: both of them, and saves, as Triton kernels; the arena is read and written over the bus
- `triton_support`: whether there is Triton, and what its callers share
"""
