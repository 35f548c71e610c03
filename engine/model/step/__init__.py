"""One step of the scheduler on the model: tensors, forward, graphs, samples.

Decides nothing about requests.

- `draw`: the draw itself: argmax, and inverse CDF with top-k and top-p
- `erasure`: overwrites in HBM what was deleted
- `graphs`: decode steps and short prompts as CUDA graphs: captured at start, replayed with padding
- `runner`: runs one step of the scheduler on the model
- `sampler`: turns logits into tokens: the parameters of each row
- `tensors`: a step's arrays on the device, in one copy
- `waiting`: when the host may wait for a CUDA device, for all engines of a process
- `warm_up`: what a first request on CUDA would wait for, done at the start
"""
