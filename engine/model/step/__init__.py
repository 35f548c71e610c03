"""One step of the scheduler on the model: tensors, forward, graphs, samples.

Decides nothing about requests.

- `draw`: the draw itself: argmax, and inverse CDF with top-k and top-p
- `drawing`: one step's tokens, drawn from its logits by the parameters of their rows
- `forms`: what each graph computes, and the tensors that all of them read and write
- `graphs`: decode steps and short prompts as CUDA graphs: captured at start, replayed with padding
- `launched`: a step between its launch and its end, and how long it took
- `masks`: which tokens the grammars of rows allow next
- `others`: what the ranks with the other parts of a model are told of a step
- `runner`: runs one step of the scheduler on the model
- `sampler`: how each row of the batch is sampled
- `tensors`: a step's arrays on the device, in one copy
- `waiting`: when the host may wait for a CUDA device, for all engines of a process
- `warm_up`: does at the start what a first request on CUDA would wait for

Decisions:

Sampling has no random generators. A token is the inverse CDF at one number, a hash of seed and token index
(SplitMix64), so a seeded answer does not depend on the batch, a preemption or a restart. Logits are computed only for
tokens that are sampled.

Decode steps are CUDA graphs, captured at the start for batch sizes up to `max_num_seqs` (at most 512) in one memory
pool, and replayed with padding. A step launches about a thousand small kernels; a replay is one launch. A step that
loads runs eagerly, because a graph does not wait layer by layer. The last tokens of a prompt, up to 128 and alone in
their step, are graphs, too: after a hit in HBM, launching their kernels takes longer than running them. If these
cannot be captured, decoding keeps its graphs.

A model that waits for the device, for example because its routing counts tokens, is found before its capture: a trial
step refuses every wait. Torch refuses waits for the whole process, so steps and starts of other engines wait until the
trial has ended. Such a model runs eagerly, with a line in the log. So does a model whose replay gives other logits than
the same work done eagerly over the same tensors. A capture that fails takes torch's allocator out of its pool again.

A row with a grammar is drawn when that has consumed the row's last token. A step that is launched ahead computes its
logits meanwhile and draws later: when its tokens are read, or before the next step is launched. The matcher belongs to
the request, so it outlives the row.

A decode step waits for the device once, for its tokens. Special token ids mark the rows to look at again.

The engine warms up before it serves: it runs steps of every form that attention distinguishes, which write nothing. So
no request waits for a compiler. A thread that steps does it again, because cuBLAS keeps a workspace for each thread.
"""
