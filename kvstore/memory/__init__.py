"""The CPU tier: its memory, its arena blocks, and what moves them to and from HBM. Here is the only torch below the
engine's model, but for what assembles the store.

Knows no disk and decides nothing.

- `arena`: the CPU tier's memory, pinned for CUDA
- `device_transfer`: the same in queues of a device: what waits for what, and what is kept until when
- `layout`: the shape of a model's KV as it is stored
- `streams`: queues and events: CUDA streams, or what tests put in their place
- `tier`: slots of the arena and their states
- `transfer`: on a CPU: loads before a layer's attention, saves from the step's activations
"""
