"""One step of the scheduler on the model: tensors, forward, graphs, samples.

Decides nothing about requests.

- `draw`: the draw itself: argmax, and inverse CDF with top-k and top-p
- `drawing`: one step's tokens, drawn from its logits by the parameters of their rows
- `forms`: what each graph computes, and the tensors that all of them read and write
- `graphs`: decode steps and short prompts as CUDA graphs: captured at start, replayed with padding
- `launched`: a step between its launch and its end, and how long it took
- `runner`: runs one step of the scheduler on the model
- `sampler`: how each row of the batch is sampled
- `tensors`: a step's arrays on the device, in one copy
- `waiting`: when the host may wait for a CUDA device, for all engines of a process
- `warm_up`: what a first request on CUDA would wait for, done at the start

Decisions:

Sampling has no random generators. A token is the inverse CDF at one number, a hash of seed and token index
(SplitMix64): a seeded answer does not depend on the batch, a preemption or a restart. Logits are computed only
where a token is sampled.

Decode steps are CUDA graphs, captured at the start for batch sizes up to `max_num_seqs` (at most 512) in one memory
pool, and replayed with padding: a step launches about a thousand small kernels, and a replay is one launch. A step
that loads runs eagerly, since a graph does not wait layer by layer. Ends of prompts of up to 128 tokens, alone in
their step, are graphs, too: after a hit in HBM launching their kernels takes longer than they do. Where these
cannot be captured, decoding keeps its graphs.

A model that waits for the device is found before its capture: a trial step refuses every wait, as routing that
counts tokens needs one. Torch refuses for the whole process, so steps and starts of other engines wait until the
trial has ended. The model then runs eagerly, with a line in the log, as does one whose replay gives other logits
than the same work done eagerly over the same tensors. A capture that fails takes torch's allocator out of its pool
again.

A decode step waits for the device once, for its tokens; which rows have to be looked at again comes back in their
place. No step is scheduled before the tokens of the one before are read.

The engine warms up before it serves: steps of every form that attention distinguishes, which write nothing, so that
no request waits for a compiler. A thread that steps does it once more, since cuBLAS keeps a workspace for each
thread.
"""
