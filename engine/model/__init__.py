"""A Hugging Face model whose keys reach us without position: found, checked, loaded, taken over, made fast.

Knows no scheduler; what runs its steps is in `step`.

- `step/`: runs one step
- `files`: a model's files before anything is loaded: where they are, and what cannot be served
- `fingerprint`: names weights, rotation and layout, so that another model never hits
- `interception`: a Hugging Face causal LM whose keys reach us without position
- `lean`: decoder layers on a CPU in few operations, where that computes the same
- `loading`: from a directory or hub id to a model, its tokenizer and its window
- `memory`: how many blocks the pool gets
- `packing`: linear weights packed once, fused modules in place of the model's own
- `probe`: observes how a model rotates its keys, and refuses it when that cannot be served
"""
