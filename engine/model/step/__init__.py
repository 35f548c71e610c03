"""One step of the scheduler on the model: tensors, forward, graphs, samples.

Decides nothing about requests.

- `graphs`: decode steps and short prompts as CUDA graphs: captured at start, replayed with padding
- `masks`: which tokens the grammars of rows allow next
- `penalties`: for what a row has already seen
- `runner`: runs one step of the scheduler on the model, and steps that are in flight
- `sampler`: how each row of the batch is sampled: argmax, and inverse CDF with top-k and top-p
- `tensors`: a step's arrays on the device, in one copy; those of graphs, where they stay

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
step refuses operations that wait, in its own thread alone (torch's refusal is the whole process's). Such a model runs
eagerly, with a line in the log. So does a model whose replay gives other logits than the same work done eagerly over
the same tensors. A capture that fails, also at a wait that the trial did not see, takes torch's allocator out of its
pool again.

A row with a grammar is drawn when that has consumed the row's last token. A step that is launched ahead computes its
logits meanwhile and draws later: when its tokens are read, or before the next step is launched. The matcher belongs to
the request, so it outlives the row.

A decode step waits for the device once, for its tokens. Special token ids mark the rows to look at again.
"""
