"""The CPU tier: its memory, its arena blocks, and what moves them to and from HBM. Here is the only torch below the
engine's model, but for what assembles the store.

Knows no disk and decides nothing.

- `arena`: the CPU tier's memory, pinned for CUDA
- `device_transfer`: the same in queues of a device: what waits for what, and what is kept until when
- `layout`: the shape of a model's KV as it is stored
- `streams`: queues and events: CUDA streams, or what tests put in their place
- `tier`: slots of the arena and their states
- `transfer`: on a CPU: loads before a layer's attention, saves from the step's activations

Decisions:

Every full block is saved, straight from the activations, and nothing waits for it. A save never reads HBM, whose
keys are rotated: un-rotating is not exact in 16 bits, so raw keys are taken where they are computed. An arena block
is reserved when the block's first token is scheduled, before its id is known.

On a CPU neither saves nor loads are handed to a thread of their own. A worker beside two computing threads made
prefill 22 % slower, where the copy itself takes 3 %; so each layer of a prefill is copied where it is computed, and
the layers of a decode step together when it ends. A thread that loaded ahead began late and took a core from what
it was ahead of: the computing threads load a layer just before its attention.

On CUDA order is kept by events alone: to move KV the host waits for the device only at the start and after a
failure. A load begins after what the computation was given before; a layer waits for its load; a save begins after
its keys exist, and what it reads is kept until it has ended; arena blocks change hands when their last event is
reached. A stress test looks for torn blocks, and must see wrong values when any one wait is left out.

Loads are launched among the layers: the first four in one launch before the forward, each of the others while the
layer four before it is launched. All of them first would keep the first token waiting for the host. How fast the
bus is, is taken from the first launch alone, as later ones may have waited. Beyond 512 MiB of activations that wait
to be saved, the computation waits for the oldest save.

The save of a replayed step reads static buffers, so `wait_for_save` returns a fence, and the next replay comes
after it.

On CUDA the arena is mmap's memory, registered as mapped: exactly its size, where torch's allocator rounds up to
powers of two. On a CPU it is private memory.
"""
