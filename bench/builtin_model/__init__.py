"""Makes the built-in model, whose files lie in `engine/builtin/model`: from the checkout, in this order.

`make_tokenizer`, `train`, `evaluate`; `conversations` makes what it is taught, seeded, from `kinds` of facts
and their `phrases`, `values` for them (training and held-out), and `smalltalk`; `batches` makes tensors of it;
`report` is the table of the evaluation.
"""
