"""The CPU tier: its memory, its arena blocks, and the transfers to and from HBM.

Below the engine's model, only this package and the store's assembly use torch. Knows no disk and decides nothing.

- `device_transfer`: on CUDA: transfers in a device's queues, ordered by events
- `layout`: the shape of a model's KV as it is stored
- `ranked`: the first rank's arena for all ranks: transfers that end when they have on all of them; what a rank without
  a store moves, its own heads of that arena or, where it has no share of it, parts of blocks as bytes
- `streams`: queues and events: CUDA streams, or the tests' stand-ins
- `tier`: the arena's blocks and their states
- `transfer`: the CPU tier's memory; and on a CPU, loads before a layer's attention and saves from a step's activations

Decisions:

Every full block is saved, straight from the activations, and nothing waits for it. A save never reads HBM, whose
keys are rotated: un-rotating is not exact in 16 bits, so raw keys are taken where they are computed. An arena block
is reserved when the block's first token is scheduled, before its id is known. Layers with a window are the exception:
which of their KV is wanted is known when a turn has ended. It is read from HBM, with rotated keys; so at its place it
comes back to the bit, and a splice turns its keys in float32.

On a CPU, saves and loads have no thread of their own. A worker beside two computing threads made prefill 22 % slower,
where the copy itself takes 3 %. So each layer of a prefill is copied where it is computed, and a decode step's layers
are copied together at its end. A thread that loaded ahead began late and took a core from the computation, so the
computing threads load a layer just before its attention.

On CUDA order is kept by events alone: to move KV the host waits for the device only at the start and after a failure. A
load begins after earlier work of the computation's queue. A layer waits for its load. A save begins after its keys
exist, and its sources are kept until it has ended. An arena block changes hands when its last event is reached. A
stress test looks for torn blocks, and must see wrong values when any one wait is left out.

Loads are launched among the layers: the first four in one launch before the forward, each of the others while the layer
four before it is launched. Launching all of them first would keep the first token waiting for the host. The bus's rate
is measured on the first launch alone, as later ones may have waited. Beyond 512 MiB of activations that wait to be
saved, the computation waits for the oldest save.

The save of a replayed step reads static buffers, so `wait_for_save` returns a fence, and the next replay comes
after it.

On CUDA the arena is mmap's memory, registered as mapped: exactly its size, where torch's allocator rounds up to
powers of two. On a CPU it is private memory.
"""
