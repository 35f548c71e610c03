"""One model that several ranks compute: each has some of the layers, and of these a part of the weights and KV heads.

Knows no process and no step; a rank is given its `Part`.

- `cutting`: a network of which this rank reads and holds only its part, by transformers' plan of it
- `group`: what ranks do together (sum, gather, agree, send and receive) with gloo or NCCL, and where they meet
- `stages`: a network with some of the layers, and its forward together with the other stages

Decisions:

The plan is transformers' own (`base_model_tp_plan`, in most families), read as data. We use neither its modules and
hooks nor DTensor: a rank holds plain parameters of a smaller shape, so packing and attention stay as they are. Only
where a division ends is there a module of ours. A colwise product has some of the outputs, so a rank has some of the
heads. A rowwise product takes these as its inputs, and its results are summed over all ranks.

Weights are cut while they are read: transformers' loader gets objects that read a part of a file when it asks for the
whole. So its renaming and its merging of experts stay in use. The shapes of the empty network are cut before that, in a
subclass of the same name.

If a plan gathers q, k and v (because their norm needs all heads), the attention takes out this rank's heads again. So
the KV is divided in every model. Every rank computes the layers that a plan leaves out.

A stage is the same network with fewer modules, so its layers run in transformers' own forward, as do those of a whole
model: what stands in for the layers before them returns the hidden states that were received. The first stage has two
networks that share their modules: one up to its last layer, and one with norm and head alone. So a forward can begin
while an earlier one is still with later stages. That a plan (`base_model_pp_plan`) names hidden states only is not
enough, as some families' layers get more: the first stage compares what its layers get for two prompts.

The first stage begins to receive the rows of a forward when it has computed its own layers, not when it wants them. So
the last stage's sends end whatever the first waits for. On a device a send ends when it is received. What waits for all
work of that device, such as freeing memory, would else wait for the first stage, which may wait for its loads.
"""
