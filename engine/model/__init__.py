"""A Hugging Face model whose keys reach us without position: finds, checks, loads, intercepts it and makes it fast.

Knows no scheduler. `step` runs its steps.

- `step/`: runs one step
- `devices`: a device before the first step: which one, how many HBM blocks there, and what warms it up
- `files`: a model's files before anything is loaded: where they are, and what cannot be served
- `interception`: a Hugging Face causal LM whose keys reach us without position
- `lean`: decoder layers on a CPU in few operations, if these compute the same
- `loading`: loads a model and its window from a directory or hub id; a digest of the model, so that another one never
  hits
- `parallel/`: the part of a model that one rank has, and how parts become whole
- `packing`: linear weights packed once, fused modules in place of the model's own
- `probe`: observes how a model rotates its keys, and refuses it when that cannot be served
- `states`: layers that keep a state instead of KV: linear attention, Mamba, convolutions
- `text_part`: the text part of a model, which is all that is served of one that also sees or hears
- `tokenizer`: a model's tokenizer
- `windows`: KV of layers with a window, which lies in slots of HBM and below it as states

Decisions:

Models are Hugging Face's; the attention and the rotation are ours. The attention function is registered with
transformers; the forward of every rotary module is replaced by one that returns cos = 1 and sin = 0, so the keys
that reach us are raw. No model classes: speed comes from replacing modules in place.

Which layer rotates how is observed, not looked up. With an attention that returns zeros, hidden states do not
depend on queries and keys; revealing the real cos and sin of one source then changes a layer's keys by exactly its
rotation, which `rope` has to reproduce bit for bit. That finds layers without rotation, several tables in one
model, partial and interleaved rotation. The probe then compares the logits through the paged cache, in chunks, with
those of the untouched model, and refuses the model if anything differs. No names of functions are needed, so a new
architecture needs no new code.

Frequencies that depend on the length are fixed at load by `max_model_len`: a token's KV must not depend on who else
is in the batch.

Linear weights are packed once: on a CPU in oneDNN's layout, with q, k and v in one product. Norms are one pass, on a
CPU also those with a gate. The model's own rotation is called and does nothing. Plain layers on a CPU are lean:
residual sums, gates and activations are computed inside oneDNN's products, because small operations between products
dominate a small step. A layer is recognised by its parts, not by its class, and taken over only if it computes the same
from the same input. After the attention, a prefill's layers work in pieces of 256 tokens, so that intermediate results
stay in cache.

Layers with states are found in the same way: their modules are those that update transformers' cache while a prompt is
computed. They compute as their authors wrote them, on states that are views of our pool. What they call by names that
transformers' models share (short convolutions, the gated delta rule) is compiled code on a CPU, bound to a copy of the
forward, so other models of the process keep theirs; a module tries it beside its own. The probe compares the logits in
pieces, step by step and in a batch, and refuses what its own modules compute differently. A layer that attends to
the KV of an earlier one is found by the memory of its keys, and has no KV of its own.

The last layer computes only sampled tokens, if that leaves out 16 or more; the others need only keys and values. The
probe compares these logits, too. If they differ, the layer computes all tokens.

The engine warms up before it serves: it runs steps of every form that attention distinguishes, which write nothing. So
no request waits for a compiler. A thread that steps does it again, because cuBLAS keeps a workspace for each thread.
"""
