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

Decisions:

Models are Hugging Face's; the attention and the rotation are ours. The attention function is registered with
transformers; the forward of every rotary module is replaced by one that returns cos = 1 and sin = 0, so the keys
that reach us are raw. No model classes: speed comes from replacing modules in place.

Which layer rotates how is observed, not looked up. With an attention that returns zeros, hidden states do not
depend on queries and keys; revealing the real cos and sin of one source then changes a layer's keys by exactly its
rotation, which `rope` has to reproduce bit for bit. That finds layers without rotation, several tables in one
model, partial and interleaved rotation. The probe then compares the logits through the paged cache, in chunks, with
the untouched model's, and refuses the model when anything differs. Names of functions are not needed, so a new
architecture needs no new code.

Frequencies that depend on the length are fixed at load by `max_model_len`: a token's KV must not depend on who else
is in the batch.

Linear weights are packed once: on a CPU in oneDNN's layout; q, k and v in one product; shorter norms; no call of
the model's own rotation, which does nothing here. Plain layers on a CPU are lean: residual sums, gates and
activations are computed inside oneDNN's products, since between products a small step is made of small operations.
A layer is recognised by its parts, not by its class, and taken over only if it computes the same from the same
input. A prefill's layers work in pieces of 256 tokens behind their attention: what lies between two products stays
in cache.

The last layer computes sampled tokens only, where that leaves out 16 or more: of the others it needs keys and
values. The probe compares its logits, too, and else the layer computes all tokens.
"""
